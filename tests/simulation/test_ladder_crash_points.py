"""The ladder against a cluster that loses answers, a controller that dies between any two lines, and people
who meddle."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from slurm_watchdog.actuate import by_agent, by_slurm
from slurm_watchdog.controller.actions.ladder.next_move import next_move
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    LadderLimits,
    Reconcile,
    StuckNode,
    Wait,
    stuck_nodes,
)
from slurm_watchdog.controller.actions.ladder.state import Observed as Known
from slurm_watchdog.controller.policy.guards import why_not_in_place
from slurm_watchdog.model.actions import (
    Action,
    ActionEnd,
    ActionRun,
    Decision,
    Fence,
    Operation,
    OperationOutcome,
    OperationRecord,
    Rung,
    Verdict,
)
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import FRESH_S, OrderAnswer, Sighting
from slurm_watchdog.slurm.client import SlurmUnavailable
from tests.builders.thorough import first
from tests.simulation.scripted_slurm import EXCLUDED_BEFORE, NODES, World

LIMITS = LadderLimits(kill_switch_s=60, checkpoint_s=300, exit_s=30, step_s=120, mount_s=600, confirm_s=900)
STUCK_LIMITS = replace(LIMITS, set_down_after_s=30.0, max_drained_nodes=9, drained_percent=100.0)
CALM_AFTER_S = 900.0
BOUND_S = 5000.0
"""Once nothing goes wrong any more an action ends within this: the sum of its limits and some retries."""


class Died(Exception):
    """The controller was killed here."""


class Journal:
    """What survives: written line by line, and the controller may die before or after any line."""

    def __init__(self, world: World, decision: Decision):
        self.world, self.decision = world, decision
        self.records: dict[tuple[Operation, int], OperationRecord] = {}
        self.end: ActionEnd | None = None

    def _may_die(self) -> None:
        if self.world.faults and self.world.random.random() < 0.04:
            self.world.say("controller dies")
            raise Died

    def intent(self, do: Execute) -> None:
        self._may_die()
        assert self.end is None
        assert (do.operation, do.attempt) not in self.records, "the same attempt twice"
        self.records[do.operation, do.attempt] = OperationRecord(
            operation=do.operation, attempt=do.attempt, intent_at=self.world.now
        )
        self._may_die()

    def outcome(self, operation: Operation, attempt: int, outcome: OperationOutcome, detail: str) -> None:
        self._may_die()
        self.records[operation, attempt] = replace(
            self.records[operation, attempt], outcome=outcome, outcome_at=self.world.now, detail=detail
        )
        self.world.release_is_written |= operation is Operation.RELEASE and outcome is OperationOutcome.DONE
        self.world.say(f"{operation} {attempt}: {outcome} ({detail})")
        self._may_die()

    def run(self) -> ActionRun:
        return ActionRun(decision=self.decision, records=tuple(self.records.values()), end=self.end)


LADDERS: tuple[tuple[Rung, ...], ...] = (
    (Rung.SIGUSR1, Rung.SIGTERM, Rung.REQUEUE),
    (Rung.KILL_SWITCH, Rung.SIGTERM, Rung.REQUEUE),
    (Rung.SIGTERM, Rung.REQUEUE, Rung.RESUBMIT, Rung.CANCEL),
    (Rung.KILL_SWITCH, Rung.RESUBMIT),
    (Rung.RESUBMIT,),
    (Rung.CANCEL,),
)
IN_PLACE: tuple[tuple[Rung, ...], ...] = (
    (Rung.RESTART_STEP, Rung.REQUEUE),
    (Rung.KILL_SWITCH, Rung.RESTART_STEP, Rung.REQUEUE),
    (Rung.SIGTERM, Rung.RESTART_STEP, Rung.REQUEUE),
    (Rung.RESTART_STEP,),
)


def decision_for(world: World, ladder: tuple[Rung, ...] = ()) -> Decision:
    path = "/run/slurm-watchdog/jobs/7.0/kill" if world.run_in_path else "/shared/kill"
    return Decision(
        id="d",
        incident_id="i",
        action=Action.GRACEFUL_RESTART if world.graceful else Action.REQUEUE,
        ladder=ladder,
        loop_turns=world.random.choice([None, True, False]) if ladder else None,
        verdict=Verdict.ALLOWED,
        by="rule",
        reason="",
        decided_at=world.now,
        fence=Fence(job_id="7", restarts=0, start_at=world.start_at),
        exclude=("n1",),
        kill_switch=path if world.graceful else None,
        kill_switch_uid=1000,
        kill_switch_content="{}\n",
        nodes=NODES,
        step_at_decision=world.step,
        step_id=world.supervisor.step_id if world.supervisor is not None else "",
        start=1 if world.supervisor is not None else 0,
        avoid=("n2",) if world.supervisor is not None else (),
        uid=1000,
    )


def seen(world: World) -> Sighting | None:
    """The supervisor's file as the agent of n1 reads it."""
    each = world.supervisor
    if each is None or world.restarts or "n1" in world.silent:
        return None
    return Sighting(status=each.status, written_at=each.written_at, read_at=world.now)


async def sleep(world: World, seconds: float) -> None:
    world.pass_time(seconds)


async def look(world: World, decision: Decision) -> Known:
    try:
        job = await world.read_job("7")
        known = True
    except SlurmUnavailable:
        job, known = None, False
    first_run = world.restarts == 0
    last_word = seen(world)
    alive = last_word is not None and world.now - last_word.written_at <= FRESH_S
    status = last_word.status if last_word is not None and alive else None
    new_step = status is not None and (status.order, status.answer) == (decision.id, OrderAnswer.STARTED)
    return Known(
        decision=decision,
        limits=LIMITS,
        supervisor=status,
        in_place_objection=why_not_in_place(status),
        new_step_first_step=world.supervisor.first_step if new_step and world.supervisor is not None else None,
        now=world.now,
        job_known=known,
        job=job,
        step=world.read_step(),
        ended_s=0.0 if world.over_at is None else world.now - world.over_at,
        total_steps=world.total_steps,
        complete_checkpoint_step=world.checkpoint_step if first_run else None,
        next_first_step=world.next_first_step
        if not first_run or (world.submitted and world.now >= getattr(world, "first_step_at", 9e9))
        else None,
        submitted=submitted(world, decision) if known else None,
        submission_looked_for=known,
        stuck=await stuck(world, job) if known else (),
        stalled_mounts=("/shared",) if world.stalled else (),
        paused=world.paused,
    )


async def stuck(world: World, job: SlurmJob | None) -> tuple[StuckNode, ...]:
    """As the driver finds it in the newest listing; without one nothing is known, and nothing done."""
    if job is None or not world.sticks or job.restarts != 1:
        return ()
    try:
        node = await world.read_node("n1")
    except SlurmUnavailable:
        return (StuckNode(name="n1", objection="not listed"),)
    return stuck_nodes(job, {"n1": node}, (job, *world.others()), "", 9, lambda _: (), 30.0)


def submitted(world: World, decision: Decision) -> SlurmJob | None:
    """As the driver finds it in Slurm's listing: by its mark, the first of several."""
    mark = by_slurm.mark_of(decision)
    return next((world.as_listed(each) for each in world.submitted if mark in each.mark), None)


async def pull(world: World, decision: Decision, do: Execute) -> tuple[OperationOutcome, str]:
    assert decision.fence is not None
    match do.operation:
        case Operation.WRITE_KILL_SWITCH:
            return await by_agent.write_kill_switch(world.ask, decision, 10)
        case Operation.WRITE_ORDER:
            return await by_agent.write_order(world.ask, decision, "n1", 10, lambda: seen(world))
        case Operation.RESTART_STEP:
            time = by_agent.Time(lambda: world.now, partial(sleep, world))
            return await by_agent.restart_step(world.ask, decision, "n1", 10, 60, lambda: seen(world), time)
        case Operation.WAIT_CHECKPOINT:
            return OperationOutcome.DONE, ""
        case Operation.REQUEUE_HOLD:
            return await by_slurm.requeue_hold(world, decision.fence, only_unfinished=do.only_unfinished)
        case Operation.EXCLUDE:
            return await by_slurm.exclude(world, "7", do.nodes)
        case Operation.REMOVE_KILL_SWITCH:
            return await by_agent.remove_kill_switch(
                world.ask, decision, (frozenset(NODES) - world.silent).union(do.nodes), 10
            )
        case Operation.RELEASE:
            new = submitted(world, decision) if do.instead else None
            return await by_slurm.release(world, "7" if new is None else new.job_id)
        case Operation.SET_DOWN:
            return await by_slurm.set_down(
                world,
                decision.fence,
                do.nodes,
                "slurm-watchdog: unkillable",
                lambda _: None,
                lambda *_: False,
            )
        case Operation.SIGNAL_USR1 | Operation.SIGNAL_TERM:
            name = "USR1" if do.operation is Operation.SIGNAL_USR1 else "TERM"
            return await by_slurm.send_signal(world, decision.fence, name, "steps")
        case Operation.CANCEL:
            return await by_slurm.cancel(world, decision.fence)
        case Operation.RESUBMIT:
            return await by_slurm.resubmit(world, decision, do.nodes)
        case _:
            raise AssertionError(do.operation)


async def live(world: World, journal: Journal) -> None:
    """One life of the controller, as slurm_watchdog.controller.actions.driver does it: until the end, or
    until it dies."""
    run = journal.run()
    while True:
        if world.now > 1000.0 + CALM_AFTER_S:
            world.calm()
        assert world.now < 1000.0 + CALM_AFTER_S + BOUND_S, "it does not come to an end"
        limits = STUCK_LIMITS if world.sticks else LIMITS
        move = next_move(replace(await look(world, journal.decision), records=run.records, end=run.end, limits=limits))
        if isinstance(move, Finish):
            journal.end, world.ended = move.end, True
            return
        if isinstance(move, Wait):
            world.pass_time(world.random.uniform(1, 8))
        elif isinstance(move, Reconcile):
            journal.outcome(move.operation, move.attempt, move.outcome, move.detail)
        elif isinstance(move, Execute):
            journal.intent(move)
            journal.outcome(move.operation, move.attempt, *await pull(world, journal.decision, move))
        run = journal.run()


async def history(
    seed: int, ladder: tuple[Rung, ...] = (), *, sticks: bool = False, supervised: bool = False
) -> tuple[World, Journal]:
    graceful = Rung.KILL_SWITCH in ladder if ladder else bool(seed % 2)
    world = World(seed, graceful=graceful, run_in_path=bool(seed // 2 % 2), sticks=sticks, supervised=supervised)
    decision = decision_for(world, ladder)
    world.hung = decision.loop_turns is False
    journal = Journal(world, decision)
    while journal.end is None:
        try:
            await live(world, journal)
        except Died:
            world.pass_time(world.random.uniform(0, 60))
    return world, journal


def check_end(world: World, journal: Journal) -> None:
    end = journal.end
    assert end is not None and end.detail
    assert all(record.outcome is not None for record in journal.records.values()), "an intent without an outcome"
    assert set(world.excluded) >= set(EXCLUDED_BEFORE)
    assert not world.dangerous_switches(), "a kill switch was left behind"
    in_place = world.supervisor is not None and world.supervisor.first_step is not None
    if end.ok and in_place and world.restarts == 0:
        assert world.requeues_by_us == 0
    elif end.ok and journal.decision.ladder and world.restarts == 0:
        assert world.state in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT"), "ended, and it is there"
    elif end.ok:
        assert world.restarts > 0
        assert world.next_first_step is not None
        assert world.held_by is None
    elif world.held_by == "us" and world.state in ("PENDING", "COMPLETING"):
        assert "held" in end.detail, end.detail


@pytest.mark.parametrize("block", first(1, range(8)))
def test_whatever_is_lost_and_whoever_dies_a_run_is_requeued_once_and_every_action_ends_in_writing(
    block: int,
) -> None:
    async def block_of_histories() -> tuple[int, int]:
        good = bad = 0
        for seed in range(block * 500, block * 500 + 500):
            try:
                world, journal = await history(seed)
                check_end(world, journal)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            good, bad = good + journal.end.ok, bad + (not journal.end.ok)
        return good, bad

    good, bad = asyncio.run(block_of_histories())
    assert good > 50, "the script hardly ever lets an action succeed"
    assert bad > 50, "the script hardly ever makes an action fail"


@pytest.mark.parametrize("ladder", first(2, LADDERS), ids="+".join)
def test_the_same_holds_for_signals_and_for_every_way_to_end_a_run(ladder: tuple[Rung, ...]) -> None:
    async def histories() -> tuple[int, int]:
        good = bad = 0
        for seed in range(400):
            try:
                world, journal = await history(seed, ladder)
                check_end(world, journal)
                running = sum(not each.held for each in world.submitted)
                assert running + (world.state == "RUNNING") <= 1, "it runs twice"
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            good, bad = good + journal.end.ok, bad + (not journal.end.ok)
        return good, bad

    good, bad = asyncio.run(histories())
    assert good > 40, "the script hardly ever lets an action succeed"
    assert bad > 10, "the script hardly ever makes an action fail"


@pytest.mark.parametrize("ladder", first(1, IN_PLACE), ids="+".join)
def test_a_step_is_started_again_once_whoever_dies_and_never_requeued_while_it_trains(ladder: tuple[Rung, ...]) -> None:
    async def histories() -> tuple[int, int]:
        in_place = otherwise = 0
        for seed in range(1500):
            try:
                world, journal = await history(seed, ladder, supervised=True)
                check_end(world, journal)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            came = journal.end.ok and world.restarts == 0 and world.starts_by_order == 1
            in_place, otherwise = in_place + came, otherwise + (not came)
        return in_place, otherwise

    in_place, otherwise = asyncio.run(histories())
    assert in_place > 100, "the script hardly ever lets a restart in place succeed"
    assert otherwise > 200, "the script hardly ever makes it fail"


def test_a_node_that_cannot_end_the_old_run_is_set_down_once_and_never_under_another_job() -> None:
    async def histories() -> tuple[int, int]:
        freed = good = 0
        for seed in range(500):
            try:
                world, journal = await history(seed, sticks=True)
                check_end(world, journal)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            freed, good = freed + world.set_down, good + (journal.end.ok and world.set_down)
        return freed, good

    freed, good = asyncio.run(histories())
    assert freed > 50, "the script hardly ever needs it"
    assert good > 50, "and hardly ever is the job saved by it"
