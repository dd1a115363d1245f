"""Simulated agents: the real command commands of the agent, the real spool and wire, and a network that loses,
delays and repeats.

Only the eyes and hands are simulated: what is seen comes from the cluster, and what a disposable child would
do is done to its files.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import (
    DumpProcessStacks,
    KillSwitch,
    Request,
    WriteSwitch,
)
from slurm_watchdog.agent.commands import Commands, OwnSwitches, Refused
from slurm_watchdog.agent.courier.streams import ANSWER_S
from slurm_watchdog.agent.delivery.replies import parse_reply
from slurm_watchdog.agent.delivery.sender import backoff_s
from slurm_watchdog.agent.delivery.spool import Spool
from slurm_watchdog.model.evidence import NodeEvidence, ProcessStack, RankEvidence, StackDump, ThreadState
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.observations import Event, EventKind, MountProbe, Role
from slurm_watchdog.model.protocol import CollectEvidence, CommandResult, JobWatch, ProbeMount
from slurm_watchdog.model.report import ProcessSection
from slurm_watchdog.wire.codec import encode_report
from tests.accuracy import looks
from tests.accuracy.feed import Reader, report_of
from tests.accuracy.training import Node
from tests.builders.agent_context import context_of
from tests.builders.summed import Memory, framed
from tests.simulation.cluster import Cluster, SimJob

RECENT = 30
"""Events of a job that an agent tells again to a controller that is new to it."""

SWITCH_PREFIXES = ("/gpfs/switches", "/run/site")
"""Where the simulated site lets kill switches lie besides the nodes' own place."""


@dataclass
class Network:
    """Shares of messages, each way; `cut` are nodes that nothing comes from or goes to."""

    lost: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    cut: frozenset[str] = frozenset()


class _Children:
    """In the place of the agent's Children: answers a moment later, from the cluster."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._count = 0

    def hung_since(self, key: str, now: float) -> float | None:
        return None

    def room(self, uid: int) -> int:
        return 4

    def settle(self, seconds: float, requests: Iterable[int]) -> None:
        pass

    def ask(
        self, key: str, request: Request[Any], deadline_s: float, now: float, then: Callable[[Answer[Any]], None],
        uid: int = -1, **_: Any,
    ) -> int | None:  # fmt: skip
        self._count += 1
        number, agent = self._count, self._agent
        life = agent.life

        def done() -> None:
            if agent.life == life:  # a child dies with its agent
                value, error = agent.do(request)
                then(Answer(number, key, value=value, error=error, timed_out=False, seconds=0.0))
                agent.push()

        agent.cluster.timeline.after(0.02 + agent.rng.random() * 0.5, done)
        return number


class _Logs:
    """The part of JobLogs that the command commands looks at."""

    become_owner = True
    mounts = ()

    def why_untouched(self, path: str) -> None:
        """No filesystem here is served by a user's program."""

    def __init__(self) -> None:
        self.watch: dict[str, JobWatch] = {}

    def key_of(self, path: str, uid: int) -> str:
        return "files"


class _Switches(OwnSwitches):
    """Those in the default place."""

    def __init__(self, agent: Agent):
        super().__init__()
        self._agent = agent

    def do(self, request: KillSwitch) -> str | None:
        error: str | None = self._agent.do(request)[1]
        return error

    def clear(self, watch: Iterable[JobWatch], running: frozenset[str]) -> None:
        """Those of runs that are over hurt no one here."""


class _Mounts:
    """In the place of the mount collector: a probe finds what the cluster says."""

    def __init__(self, agent: Agent):
        self._agent = agent

    def command(
        self, command: ProbeMount, now: float, deadline_s: float, uid: int, device: str | None,
        then: Callable[[CommandResult], None], fs_type: str | None = None,
    ) -> bool:  # fmt: skip
        agent = self._agent
        life = agent.life
        mount = next((m for m in agent.cluster.mounts if m.path == command.mount), None)
        stuck = mount is not None and agent.node.name in mount.stuck

        def done() -> None:
            if agent.life == life:
                probe: MountProbe | None = None
                if mount is not None:
                    probe = agent.cluster.probe(agent.node, mount, agent.cluster.timeline.now, wrote=True)
                then(CommandResult(command_id=command.id, ok=True, probe=probe))
                agent.push()

        agent.cluster.timeline.after(10.0 if stuck else 0.2, done)
        return True


class _Commands(Commands):
    """The agent's own, but for what it collects of a suspect job: its ranks' stacks stand for all of it."""

    agent: Agent

    def _start_collection(self, command: CollectEvidence, now: float) -> bool:
        mine = [process for process in self.processes if process.job_id == command.job_id]
        if not mine:
            raise Refused(f"no process of job {command.job_id} is on {self.node}")
        self._check_restarts(command.job_id, command.restarts)
        agent, life = self.agent, self.agent.life

        def done() -> None:
            if agent.life == life:
                evidence = agent.evidence(command.job_id, {process.pid for process in mine})
                self._answer(command.id, evidence=evidence)
                agent.push()

        agent.cluster.timeline.after(agent.rng.uniform(1, 20), done)
        return True


class Agent:
    """The agent of one node, life after life."""

    def __init__(
        self,
        node: Node,
        cluster: Cluster,
        network: Network,
        rng: random.Random,
        interval_s: float,
        post: Callable[[str, bytes, Callable[[bytes | None], None]], bool],
    ):
        """`post(node, body, answer)` hands a report over to the controller; False: nobody listens there."""
        self.node, self.cluster, self.network, self.rng = node, cluster, network, rng
        self.interval_s, self._post = interval_s, post
        self.life = 0
        self.alive = False
        self.cannot_dump: str | None = None
        """Why its collections have no stacks."""
        self.reader = Reader()
        self.start(rng.random() * interval_s)

    # ------------------------------------------------------------------------------------ lives

    def start(self, after_s: float) -> None:
        def begin() -> None:
            if self.alive or self.node.name in self.cluster.down:
                return
            self.life += 1
            self.alive = True
            self.node.agent, self.node.sequence = self.life, 0
            self.began = self.cluster.timeline.now
            self.spool = Spool(8 << 20, 600.0)
            self.logs = _Logs()
            children: Any = _Children(self)
            logs: Any = self.logs
            mounts: Any = _Mounts(self)
            settings = SimpleNamespace(probe_deadline=10.0, kernel_log="")
            context = context_of(children, logs, node=self.node.name, boot_id="", settings=settings, mounts=mounts)
            self.commands = _Commands(context, SWITCH_PREFIXES)
            self.commands.switches = _Switches(self)
            self.memory, self.closely = Memory(), False
            self.commands.agent = self
            self.recent: dict[str, deque[tuple[float, Event]]] = {}
            self.controller_id = ""
            self.again: list[tuple[float, Event]] = []
            self._in_flight = False
            self._failures = 0
            self._tick(self.life)

        self.cluster.timeline.after(after_s, begin)

    def kill(self) -> None:
        """With everything that it remembered, its spool and its commands included."""
        self.alive = False
        self.life += 1

    # ------------------------------------------------------------------------------------ reports

    def _tick(self, life: int) -> None:
        if life != self.life:
            return
        self.report()
        self.cluster.timeline.after(self.interval_s * (0.99 + 0.02 * self.rng.random()), lambda: self._tick(life))

    def push(self) -> None:
        """A result goes out at once, with a fresh report."""
        if self.alive and self.commands.has_results:
            self.report()

    def report(self) -> None:
        now = self.cluster.timeline.now
        self.cluster.catch_up()
        said = self.cluster.report(self.node)
        self.commands.sections.put(ProcessSection(processes=tuple(said.processes)))
        self.commands.advance(now)
        report = report_of(said, self.reader)
        events = tuple(self._seen(event, now) for event in report.events)
        again, self.again = self.again, []
        events = (*(replace(event, age_s=event.age_s + now - at) for at, event in again), *events)
        report = replace(
            report, agent_id=f"{self.node.name}-{self.life}", interval_s=self.interval_s, events=events,
            results=self.commands.take_results(),
        )  # fmt: skip
        report = framed(report, now, self.memory, self.closely)
        self.spool.put(report.sequence, encode_report(report), now)
        self._send(self.life)

    def _seen(self, event: Event, now: float) -> Event:
        if now - event.age_s < self.began:
            return replace(event, backlog=True)
        if event.kind in (EventKind.PROGRESS, EventKind.CHECKPOINT):
            self.recent.setdefault(event.job_id, deque(maxlen=RECENT)).append((now, event))
        return event

    # ------------------------------------------------------------------------------------ the network

    def _send(self, life: int) -> None:
        if life != self.life or self._in_flight:
            return
        first = self.spool.first()
        if first is None:
            return
        timeline, rng, network = self.cluster.timeline, self.rng, self.network
        body, sequence = first.aged(timeline.now), first.sequence
        self._in_flight = True
        answered = [False]

        def answer(reply: bytes | None) -> None:
            """`None`: refused, or nobody answered in time."""
            if life != self.life or answered[0]:
                return
            answered[0], self._in_flight = True, False
            if reply is None:
                self._failures += 1
                timeline.after(backoff_s(self._failures, rng.random()), lambda: self._send(life))
                return
            self._failures = 0
            self.spool.done(sequence)
            self._take(reply)
            self._send(life)

        def back(reply: bytes | None) -> None:
            if self.node.name not in network.cut and rng.random() >= network.lost:
                timeline.after(0.002, lambda: answer(reply))

        def arrive() -> None:
            if self.node.name not in network.cut and not self._post(self.node.name, body, back):
                timeline.after(0.01, lambda: answer(None))

        timeline.after(ANSWER_S, lambda: answer(None))
        if rng.random() >= network.lost:
            delay_s = rng.uniform(1, 40) if rng.random() < network.late else 0.001 + rng.random() * 0.02
            timeline.after(delay_s, arrive)
            if rng.random() < network.twice:
                timeline.after(delay_s + rng.uniform(0, 20), arrive)

    def _take(self, body: bytes) -> None:
        reply, now = parse_reply(body), self.cluster.timeline.now
        self.logs.watch = {watch.job_id: watch for watch in reply.watch}
        if reply.controller_id != self.controller_id:
            self.controller_id = reply.controller_id
            self.memory.frames.clear()
            self.again = [each for recent in self.recent.values() for each in recent]
            self.again.sort(key=lambda each: each[0] - each[1].age_s)
        self.commands.watch_jobs(reply.watch, now)
        self.commands.accept(reply.commands, now)
        self.closely = self.closely if reply.closely is None else reply.closely
        self.push()

    # ------------------------------------------------------------------------------------ hands

    def do(self, request: Request[Any]) -> tuple[Any, str | None]:
        """What a child does: (value, error)."""
        if isinstance(request, KillSwitch):
            line = compose_line(msgspec.structs.asdict(request))
            if isinstance(request, WriteSwitch):
                return None, self.cluster.write_switch(self.node.name, request.path, line)
            return None, self.cluster.remove_switch(self.node.name, request.path, line)
        if isinstance(request, DumpProcessStacks):
            return list(self._stacks({each.pid for each in request.processes})), None
        return None, f"no such task: {request.task}"

    def evidence(self, job_id: str, pids: set[int]) -> NodeEvidence:
        ranks = tuple(
            RankEvidence(
                pid=each.pid, start_ticks=each.start_ticks, role=each.role, rank=each.rank, local_rank=each.local_rank,
                dumps=(StackDump(after_s=0.0, threads=() if self.cannot_dump else each.threads, cpu_s=each.cpu_s, main_cpu_s=each.main_cpu_s, error=self.cannot_dump),),
                state=each.state, error=each.error,
                threads=(ThreadState(thread_id=each.pid, state=each.state or "", syscall=each.syscall),),
            )
            for each in self._stacks(pids)
        )  # fmt: skip
        return NodeEvidence(node=self.node.name, job_id=job_id, ranks=ranks)

    def _stacks(self, pids: set[int]) -> Iterable[ProcessStack]:
        t = self.cluster.timeline.now
        self.cluster.catch_up()
        for job in self.cluster.jobs:
            for rank in job.ranks:
                if rank.node != self.node.name or rank.pid not in pids or rank.gone or rank.zombie:
                    continue
                assert isinstance(job, SimJob)
                job.count(rank, t)
                look = rank.look
                frames = self.rng.choice(look.frames) if look.frames else ()
                threads = () if look.undumpable or not frames else looks.threads_of(look, frames, rank.pid)
                yield ProcessStack(
                    node=rank.node, pid=rank.pid, start_ticks=rank.start_ticks, job_id=job.job_id, role=Role.RANK,
                    rank=rank.number, local_rank=rank.local, threads=threads, error=look.undumpable, state=look.state,
                    cpu_s=rank.cpu_s, main_cpu_s=rank.cpu_s, io_bytes=int(rank.io_bytes), syscall=look.syscall or look.call,
                    others=looks.others_of(rank.number, look),
                )  # fmt: skip
