"""A world for one action: a Slurm job that lives its own life, requests that get lost, people, a filesystem,
kill switches.

Everything is drawn from one seeded generator, so that a seed is a history. What must never happen is checked at
the moment it would happen, not afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from slurm_watchdog.model.protocol import (
    Command,
    CommandResult,
    GiveOrder,
    RemoveKillSwitch,
    WithdrawOrder,
    WriteKillSwitch,
)
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.supervisor import (
    BATCH_STEP,
    ORDER_LIFETIME_S,
    PROTOCOL,
    OrderAnswer,
    RestartOrder,
    SupervisorState,
    SupervisorStatus,
)
from slurm_watchdog.slurm.client import SignalTo, SlurmRefused, SlurmUnavailable, Submission

NODES = ("n1", "n2")
"""What a restart in the allocation does without for the one start, to find a slow node."""
EXCLUDED_BEFORE = ("bad7",)
OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"})


@dataclass
class Submitted:
    """A job that was submitted in place of the one of the story: held first."""

    job_id: str
    mark: str
    held: bool = True
    runs_from: float | None = None


SUPERVISOR_STEPS = 8.0
"""Seconds that the supervisor takes at most to end a step and to start the next."""


class Supervisor:
    """The supervisor of the job's batch script, on n1: it reads orders, ends and starts steps, fails, is killed."""

    def __init__(self, world: World):
        self.world, random = world, world.random
        self.alive, self.step, self.starts = True, 0, 1
        self.orders: dict[str, tuple[RestartOrder, float]] = {}
        """Those that the agent hands it, by decision, and when they were given."""
        self.ordered = False
        self.read: set[str] = set()
        """Decisions that were seen: no order counts twice."""
        self.in_batch = random.random() < 0.3
        """Its command starts no step: the ranks are in the batch step."""
        self.status, self.written_at = self._status(), world.now
        self.starts_at: float | None = None
        self.waits_until: float | None = None
        self.trains_at: float | None = None
        self.first_step: int | None = None
        self.spare = random.random() < 0.8
        self.comes_up = random.random() < 0.9
        self.trains = random.random() < 0.9
        self.dies_at = world.now + random.uniform(0, 400) if random.random() < 0.2 else float("inf")
        self.fails_at = world.now + random.uniform(0, 300) if random.random() < 0.15 else float("inf")
        self.stopped = (0.0, 0.0)
        if random.random() < 0.2:  # SIGSTOP, and later SIGCONT
            since = world.now + random.uniform(0, 200)
            self.stopped = (since, since + random.uniform(5, 200))

    def _status(self, **changes: object) -> SupervisorStatus:
        same = {"protocol": PROTOCOL, "state": SupervisorState.RUNNING, "nodes": NODES, "restarts_left": 3}
        return SupervisorStatus(**(same | {"step_id": self.step_id, "starts": self.starts} | changes))  # type: ignore[arg-type]

    @property
    def step_id(self) -> str:
        """Of the present start."""
        return BATCH_STEP if self.in_batch else str(self.step)

    def wait_for_order(self) -> None:
        """The command has ended after a kill switch."""
        if self.waits_until is None:
            self.waits_until = self.world.now + 120.0
            self.status = msgspec.structs.replace(self.status, state=SupervisorState.WAITING)

    def live(self) -> None:
        """What it does until now."""
        world, now = self.world, self.world.now
        if not self.alive or world.state != "RUNNING" or world.restarts:
            return
        if now >= self.dies_at and world.faults:
            self.alive = False
            world.say("the supervisor is killed, and with it the batch script ends")
            world._come_to_an_end("FAILED")
            return
        if self.stopped[0] <= now < self.stopped[1]:
            return
        if now >= self.fails_at:
            self.fails_at, self.step, self.starts = float("inf"), self.step + 1, self.starts + 1
            last = {"order": self.status.order, "answer": self.status.answer}
            self.status = self._status(words="the command failed and was started again", **last)
            world.say("the supervisor starts the command again by itself")
        self._take_order()
        if self.waits_until is not None and now >= self.waits_until and self.starts_at is None and world.faults:
            world._come_to_an_end("COMPLETED")
            return
        if self.starts_at is not None and now >= self.starts_at:
            self._start()
        if self.trains_at is not None and now >= self.trains_at and self.trains:
            self.first_step = self.first_step or 401
        self.written_at = now

    def _take_order(self) -> None:
        for order, given_at in self.orders.values():
            if order.decision in self.read:
                continue
            self.read.add(order.decision)
            answer, words = OrderAnswer.TAKEN, ""
            if (order.step_id, order.start) != (self.step_id, self.starts):
                answer, words = OrderAnswer.REFUSED, f"step {order.step_id} is over"
            elif self.world.now - given_at > ORDER_LIFETIME_S:
                answer, words = OrderAnswer.REFUSED, "too old"
            elif not self.spare:
                answer, words = OrderAnswer.REFUSED, "no spare is left"
            else:
                self.starts_at = self.world.now + self.world.random.uniform(0, SUPERVISOR_STEPS)
                self.world.step_was_ended = True
            self.status = self._status(order=order.decision, answer=answer, words=words)
            self.world.say(f"the supervisor: {answer} {words}")

    def _start(self) -> None:
        self.starts_at = None
        if not self.comes_up:
            self.status = self._status(order=self.status.order, answer=OrderAnswer.FAILED, words="no node is left")
            return
        self.step, self.starts, self.waits_until = self.step + 1, self.starts + 1, None
        self.world.starts_by_order += 1
        assert self.world.starts_by_order == 1, "one order started the command twice"
        assert "n1" not in self.world.switches, "started under a kill switch"  # n2 is left out
        self.trains_at = self.world.now + self.world.random.uniform(2, 60)
        self.status = self._status(order=self.status.order, answer=OrderAnswer.STARTED)
        self.world.say("the supervisor has started the next step")


class World:
    """One cluster with one job. Implements slurm_watchdog.slurm.client.SlurmClient."""

    def __init__(self, seed: int, *, graceful: bool, run_in_path: bool, sticks: bool = False, supervised: bool = False):
        self.random = random.Random(seed)
        self.graceful = graceful
        self.run_in_path = run_in_path
        self.now = 1000.0
        self.faults = True
        self.state = "RUNNING"
        self.restarts = 0
        self.held_by: str | None = None
        self.start_at: float | None = 900.0
        self.excluded = EXCLUDED_BEFORE
        self.completing_until = 0.0
        self.over_at: float | None = None
        self.last_lines_read_at = 0.0
        self.queued_until = 0.0
        self.listens = self.random.random() < 0.8
        self.step = 500
        self.total_steps: int | None = self.random.choice([None, 10_000])
        self.checkpoint_step: int | None = None
        self.release_is_written = False
        self.next_first_step: int | None = None
        self.switches: dict[str, str] = {}
        self.was_switched = False
        self.silent: set[str] = set()
        self.stalled = False
        self.paused = False
        self.ended = False
        self.history: list[str] = []
        self.signals: list[str] = []
        self.hung = False
        """Whether the decision says that the loop did not turn: nothing is lost then by ending it."""
        self.cancels_by_us = 0
        self.submitted: list[Submitted] = []
        self.requeues_by_us = 0
        self.releases_by_us = 0
        self.life = self.random.choice(["hangs", "hangs", "finishes", "node_fails", "cancelled", "recovers"])
        self.life_at = self.now + self.random.uniform(0, 300)
        self.people = self.random.random() < 0.3
        self.sticks = sticks
        """Whether processes of the first run cannot be killed on n1, so that Slurm 25.11 keeps the requeued
        job COMPLETING there."""
        self.neighbour = sticks and self.random.random() < 0.3
        self.gives_up_at = float("inf")
        self.node_reason = ""
        self.set_down = 0
        self.step_was_ended = False
        """An order ended the step: what becomes of the job then is our affair."""
        self.starts_by_order = 0
        self.supervisor = Supervisor(self) if supervised else None

    # ------------------------------------------------------------------------------------ the job's own life

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.state == "COMPLETING" and self.now >= self.completing_until:
            self.state = "PENDING" if self.next_state == "PENDING" else self.next_state
            self.over_at = None if self.state == "PENDING" else self.now
            self.last_lines_read_at = self.now + self.random.uniform(0, 12)
        if self.state == "PENDING" and self.held_by is None and self.now >= self.queued_until:
            self.state, self.start_at, self.next_first_step = "RUNNING", self.now, None
            self.first_step_at = self.now + self.random.uniform(5, 60)
            self.run_kills_itself = bool(self.switches) and not self.run_in_path
            self.say("starts again")
        if self.state == "RUNNING" and self.restarts > 0 and self.now >= self.first_step_at:
            self.next_first_step = self.next_first_step or 401
        if self.state == "RUNNING" and self.restarts == 0:
            self._first_run()
        if self.faults:
            self._people_and_storage()

    def read_step(self) -> int:
        """The step as the agents' reports have it: the last lines of a run that is over are read late."""
        late = self.state in ("COMPLETED", "COMPLETING") and self.now < self.last_lines_read_at
        made_all = self.total_steps is not None and self.step >= self.total_steps
        return 500 if made_all and (late or self.state == "COMPLETING") else self.step

    def _first_run(self) -> None:
        if self.supervisor is not None:
            self.supervisor.live()
        if self.state != "RUNNING" or self.starts_by_order:
            return
        heard = self.graceful and self.listens and bool(self.switches)
        if heard and self.random.random() < 0.5:
            self.checkpoint_step = self.step
            ends = self.random.random() < 0.8
            if ends and self.supervisor is not None and self.supervisor.alive:
                self.supervisor.wait_for_order()
            elif ends and self.total_steps is not None and self.random.random() < 0.2:
                self.step = self.total_steps
                self._come_to_an_end("COMPLETED")
                self.say("makes its last step, too")
            elif ends:
                self._come_to_an_end(self.random.choice(["COMPLETED", "FAILED"]))
        elif self.now >= self.life_at and self.faults:
            self._fate()

    def _fate(self) -> None:
        if self.life == "finishes":
            self.step = self.total_steps or self.step + 3
            self._come_to_an_end(self.random.choice(["COMPLETED", "FAILED", "TIMEOUT"]))
        elif self.life == "cancelled":
            self._come_to_an_end("CANCELLED")
        elif self.life == "node_fails":
            self._requeue("Slurm", held=False)
        elif self.life == "recovers":
            self.step += 1
        self.say(f"fate: {self.life}")
        self.life = "hangs" if self.life != "recovers" else "recovers"

    def _come_to_an_end(self, state: str) -> None:
        self.state, self.next_state = "COMPLETING", state
        self.completing_until = self.now + self.random.uniform(0, 20)

    def _people_and_storage(self) -> None:
        if self.random.random() < 0.05:
            self.stalled = not self.stalled
        if self.random.random() < 0.03:
            self.paused = not self.paused
        if self.random.random() < 0.05:
            self.silent ^= {self.random.choice(NODES)}
        if not self.people or self.state != "PENDING" or self.random.random() > 0.1:
            return
        deed = self.random.choice(["release", "hold", "cancel"])
        self.say(f"a person: {deed}")
        if deed == "release":
            self.held_by = None
        elif deed == "hold":
            self.held_by = self.held_by or "a person"
        else:
            self.state = "CANCELLED"

    def calm(self) -> None:
        """From here on nothing goes wrong any more."""
        self.faults = self.stalled = self.paused = False
        self.silent.clear()

    def say(self, text: str) -> None:
        self.history.append(f"{self.now:7.0f} {self.state} run {self.restarts} held {self.held_by}: {text}")

    def _requeue(self, by: str, *, held: bool) -> None:
        self.restarts += 1
        self.held_by = by if held else None
        self.state, self.next_state = "COMPLETING", "PENDING"
        self.completing_until = self.now + self.random.uniform(0, 20)
        self.queued_until = self.completing_until + self.random.uniform(0, 60)
        if self.sticks and by == "us":
            self.completing_until, self.gives_up_at = float("inf"), self.now + 20
        self.say(f"requeued by {by}")

    # ------------------------------------------------------------------------------------ requests

    def _fate_of_request(self, name: str) -> str:
        assert not self.ended, f"{name} after the end of the action"
        self.pass_time(self.random.uniform(0, 2))
        fate = self.random.choices(["done", "refused", "lost", "done and lost"], [80, 3, 8, 9])[0]
        self.say(f"request {name}: {fate if self.faults else 'done'}")
        return fate if self.faults else "done"

    def _answer(self, fate: str) -> None:
        if fate in ("lost", "done and lost"):
            raise SlurmUnavailable("time-out")

    async def read_view(self) -> SlurmView:
        job = await self.read_job("7")
        assert job is not None
        return SlurmView(jobs=(job, *self.others()), nodes=(await self.read_node("n1"),))

    def others(self) -> tuple[SlurmJob, ...]:
        """Jobs that run on n1 too, until they end by themselves."""
        there = self.neighbour and self.now < 1600.0
        return (SlurmJob(job_id="8", state="RUNNING", nodes=("n1",)),) if there else ()

    async def read_node(self, node: str) -> SlurmNode:
        if self.faults and self.random.random() < 0.1:
            raise SlurmUnavailable("time-out")
        if self.now >= self.gives_up_at and not self.node_reason:
            self.node_reason = "Kill task failed (JobId=7 StepId=0)"
        state = "DOWN+DRAIN" if self.set_down else "MIXED+DRAIN" if self.node_reason else "MIXED"
        return SlurmNode(name=node, address="", state=state, reason=self.node_reason)

    async def set_node_down(self, node: str, reason: str) -> None:
        paused = self.paused
        fate = self._fate_of_request(f"set {node} DOWN")
        if fate == "refused":
            raise SlurmRefused("access denied")
        if fate != "lost":
            assert self.sticks and node == "n1", "another node than the one that holds the job up"
            assert not self.others(), "a node was set DOWN on which another job runs"
            assert not paused, "set DOWN while paused"
            assert self.node_reason.startswith("Kill task failed"), "Slurm had not given up, or it was done before"
            self.set_down, self.node_reason = self.set_down + 1, reason
            assert self.set_down == 1
            self.completing_until = self.now + 4
        self._answer(fate)

    async def read_job(self, job_id: str) -> SlurmJob | None:
        if self.faults and self.random.random() < 0.1:
            raise SlurmUnavailable("time-out")
        new = next((each for each in self.submitted if each.job_id == job_id), None)
        if new is not None:
            return self.as_listed(new)
        return SlurmJob(
            job_id=job_id,
            state=self.state,
            restarts=self.restarts,
            start_at=self.start_at,
            nodes=("n1",) if self.sticks and self.state == "COMPLETING" and self.restarts else NODES,
            held=self.held_by is not None,
            excluded_nodes=self.excluded,
        )

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        fate = self._fate_of_request(f"requeue_hold(only_unfinished={only_unfinished})")
        if fate == "refused":
            raise SlurmRefused("access denied")
        if fate != "lost":
            if only_unfinished and (self.state in OVER or self.state == "COMPLETING"):
                raise SlurmRefused("job is ending or has ended")
            assert self.restarts == 0, "another run than the decision's was requeued"
            trains = self.supervisor is not None and self.supervisor.first_step is not None
            assert not (trains and self.state == "RUNNING"), "a step that trains again was requeued"
            if self.state in OVER and not self.step_was_ended:
                made_all = self.total_steps is not None and self.step >= self.total_steps
                ordered = self.supervisor is not None and self.supervisor.ordered
                asked = (self.graceful and self.was_switched) or self.signals or ordered
                assert asked and not made_all, "a finished job was run again"
                ended_by_us = (self.signals or ordered) and self.hung and self.state in ("FAILED", "TIMEOUT")
                assert self.checkpoint_step is not None or ended_by_us, "run again without a complete checkpoint"
                assert self.state != "CANCELLED", "a cancelled job was run again"
            self.requeues_by_us += 1
            assert self.requeues_by_us == 1
            self._requeue("us", held=True)
        self._answer(fate)

    async def set_excluded_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        fate = self._fate_of_request(f"exclude {nodes}")
        if fate == "refused":
            raise SlurmRefused("not allowed")
        if fate != "lost":
            assert set(nodes) >= set(self.excluded), "existing exclusions were dropped"
            self.excluded = tuple(nodes)
        self._answer(fate)

    async def release(self, job_id: str) -> None:
        stalled, paused = self.stalled, self.paused
        new = next((each for each in self.submitted if each.job_id == job_id), None)
        fate = self._fate_of_request("release")
        if new is not None and fate not in ("refused", "lost") and new.held:
            assert self.state in OVER, "the new job was let go while the old one was there"
            assert self.restarts == 0, "the old job runs again, and so would the new one"
            assert not self.dangerous_switches(), "released under a kill switch"
            assert all(each.held for each in self.submitted), "two new jobs were let go"
            new.held, new.runs_from = False, self.now + self.random.uniform(1, 30)
            self.next_first_step = 401
            self.first_step_at = new.runs_from + 20
        if new is not None:
            if fate == "refused":
                raise SlurmRefused("access denied")
            self._answer(fate)
            return
        if fate == "refused":
            raise SlurmRefused("access denied")
        if fate != "lost" and self.held_by is not None:
            assert not stalled, "released while the filesystem was stalled"
            assert not paused, "released while paused"
            assert not self.dangerous_switches(), "released under a kill switch"
            self.releases_by_us += 1
            # If the answer was lost nobody knows that it was done, and that the job is held by a person since.
            assert self.releases_by_us == 1 or not self.release_is_written, "released twice"
            self.held_by = None
        self._answer(fate)

    def dangerous_switches(self) -> set[str]:
        return set() if self.run_in_path else set(self.switches)

    async def hold(self, job_id: str) -> None:
        raise AssertionError("no action holds a job by itself")

    async def cancel(self, job_id: str) -> None:
        # scancel has no fence: what Slurm requeues by itself in the moment between the look and this cannot
        # be told apart.
        state, restarts = self.state, self.restarts
        fate = self._fate_of_request("cancel")
        if restarts != self.restarts:
            return
        if fate == "refused":
            raise SlurmRefused("access denied")
        if fate != "lost" and state not in OVER:
            assert self.restarts == 0, "another run than the decision's was cancelled"
            assert self.requeues_by_us == 0, "requeued and cancelled"
            if self.state == "RUNNING":
                self.cancels_by_us += 1
                self._come_to_an_end("CANCELLED")
        self._answer(fate)

    async def send_signal(self, job_id: str, signal: str, to: SignalTo) -> None:
        restarts = self.restarts
        fate = self._fate_of_request(f"signal {signal}")
        if restarts != self.restarts:
            return
        if fate == "refused":
            raise SlurmRefused("access denied")
        if fate != "lost" and self.state == "RUNNING":
            assert self.restarts == 0, "another run than the decision's got a signal"
            assert signal not in self.signals, "a signal was sent twice"
            self.signals.append(signal)
            deed = self.random.choice(["nothing", "saves", "saves and ends", "ends"])
            if "saves" in deed:
                self.checkpoint_step = self.step
            if "ends" in deed:
                self._come_to_an_end("COMPLETED" if "saves" in deed else "FAILED")
        self._answer(fate)

    async def read_script(self, job_id: str) -> bytes:
        return b"#!/bin/sh"

    async def submit(self, submission: Submission) -> str:
        fate = self._fate_of_request("submit")
        if fate == "refused":
            raise SlurmRefused("Invalid account")
        assert "--hold" in submission.options, "a second one that nobody knows of would run"
        if fate != "lost":
            (comment,) = [each for each in submission.options if each.startswith("--comment=")]
            self.submitted.append(Submitted(str(9000 + len(self.submitted)), comment.removeprefix("--comment=")))
        self._answer(fate)
        return self.submitted[-1].job_id

    def as_listed(self, new: Submitted) -> SlurmJob:
        running = new.runs_from is not None and self.now >= new.runs_from
        return SlurmJob(job_id=new.job_id, state="RUNNING" if running else "PENDING", held=new.held, comment=new.mark)

    # ------------------------------------------------------------------------------------ nodes

    async def ask(self, node: str, command: Command, deadline_s: float) -> CommandResult:
        """The kill switch's lever: a node may be silent, fail, or do it and lose the answer."""
        assert not self.ended, "a command after the end of the action"
        self.pass_time(self.random.uniform(0, 2))
        fate = self.random.choices(["done", "lost", "done and lost"], [85, 8, 7])[0] if self.faults else "done"
        fate = "lost" if node in self.silent else fate
        orders = self.supervisor.orders if self.supervisor is not None else {}
        if isinstance(command, GiveOrder):
            assert node == "n1", "an order was given elsewhere than on the batch host"
            if fate != "lost":
                orders.setdefault(command.order.decision, (command.order, self.now))
                assert self.supervisor is not None
                self.supervisor.ordered = True
        elif isinstance(command, WithdrawOrder):
            if fate != "lost":
                orders.pop(command.decision, None)
        elif fate != "lost" and isinstance(command, WriteKillSwitch):
            self.switches[node], self.was_switched = command.content, True
        elif fate != "lost" and isinstance(command, RemoveKillSwitch):
            assert self.switches.get(node, command.content) == command.content
            self.switches.pop(node, None)
        return CommandResult(command_id=command.id, ok=fate == "done", error=None if fate == "done" else "no answer")
