"""Drives a simulated world through the real judgement, under the world's clock.

`judge` hands reports to `ClusterState` and lets `Judge` look, and answers what detectors ask for (stacks,
probes) as agents would.
`write_trace` writes the same world as a trace v1, which `slurm-watchdog replay` reads; nobody answers questions there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.evidence.requests import FIRST_DUMPS, LATER_DUMPS_EVERY_S, PROBE_EVERY_S, early_budget
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import ProcessStack, WaitingThreads
from slurm_watchdog.model.incidents import Finding, Incident, IncidentKind, IncidentState, StackRequest, Truth
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.report import Report
from slurm_watchdog.replay.player import numbered_ids
from tests.accuracy import looks
from tests.accuracy.feed import Line, Reader, report_of, slurm_trace, trace_of
from tests.accuracy.looks import Look
from tests.accuracy.scene import Scene
from tests.accuracy.training import Job, Node, Rank, Worker
from tests.accuracy.world import INTERVAL_S, Mount, World
from tests.builders.summed import Memory, framed, summed

RECORDS_S = 25.0
"""Records of collectives are there so long after a hang has fired: as long as a collection takes."""
ALERT_S, SUSPECT_S = 30.0, 3.0
"""After anything that is not as it should be, every tick is looked at for so long; while something is asked
for, every third one."""
LATE_SHARE, TWICE_SHARE = 0.004, 0.002
"""Of the reports: so many wait in the agent's spool for some seconds, so many arrive twice."""


@dataclass
class Story:
    """What the judgement made of a world."""

    incidents: dict[str, Incident] = field(default_factory=dict)
    """The newest state of each that ever fired, by id."""
    failures: list[str] = field(default_factory=list)
    """Detectors that raised."""
    late: list[tuple[float, float]] = field(default_factory=list)
    """(made at, seconds) of reports that waited in an agent's spool."""
    ended_at: float = 0.0
    reports: int = 0
    looks: int = 0


@dataclass
class _Mail:
    """Reports on their way, node by node in order."""

    made_at: float
    due: float
    report: Report


class Drive:
    """One world, one judgement."""

    def __init__(
        self, world: World, config: Config, *, interval_s: float = INTERVAL_S, calm_s: float = INTERVAL_S,
        small: bool = True,
    ):  # fmt: skip
        """`interval_s` between two reports of a node; `calm_s` between two looks while nothing is wrong. `small`: agents
        send small reports, as they do; else each is whole."""
        self.world, self.config, self.small = world, config, small
        self.interval_s, self.calm_s = interval_s, calm_s
        self.state = ClusterState(
            silent_after_s=config.controller.agent_silent_after,
            report_lifetime_s=config.report_lifetime_s,
        )
        self.story = Story()
        self.judge = Judge(config, self.state, (), numbered_ids(), lambda kind: self.story.failures.append(str(kind)))
        self._next_report = {node.name: node.phase for node in world.nodes}
        self._mail: dict[str, list[_Mail]] = {node.name: [] for node in world.nodes}
        self._readers = {node.name: Reader() for node in world.nodes}
        self._memory = Memory()
        self._close: frozenset[str] = frozenset()
        self._closely: dict[str, bool] = {}  # As each node was answered last.
        self._answers: list[tuple[float, int, object]] = []
        self._asked: dict[str, float] = {}
        self._out: set[str] = set()
        self._early = early_budget()
        self._dumps: dict[str, int] = {}
        self._slurm_at = -1000.0
        self._alert_until = self._suspect_until = float("-inf")
        self._next_look = 0.0

    def run(self, until: float, done: object = None) -> Story:
        """Until `until`, or until `done(story, now)` says that all is known."""
        t, tick_s = 0.0, self.config.controller.tick
        while t < until:
            t = self._next_moment(t, tick_s, until)
            self._step(t)
            if callable(done) and done(self.story, t):
                break
        self.story.ended_at = t
        return self.story

    def _next_moment(self, t: float, tick_s: float, until: float) -> float:
        if t < self._alert_until or self._answers:
            return t + tick_s
        due = min(*self._next_report.values(), self._next_look, self._slurm_at + self.config.slurm.poll_interval)
        ticks = max(1, -int(-(due - t) // tick_s))
        return min(until, t + ticks * tick_s)

    def _step(self, t: float) -> None:
        self.world.advance(t)
        if self.world.slurm_answers and t - self._slurm_at >= self.config.slurm.poll_interval:
            self._slurm_at = t
            self.state.apply_slurm(self.world.slurm(), t, t)
        elif not self.world.slurm_answers:
            self._slurm_at = t  # it was asked, and did not answer
        self._send(t)
        self._answer(t)
        if t >= self._next_look or t < self._alert_until:
            self._look(t)
            calm_s = min(self.calm_s, SUSPECT_S) if t < self._suspect_until else self.calm_s
            self._next_look = t + calm_s * (0.7 + 0.6 * self.world.rng.random())

    def look_every(self, calm_s: float, now: float) -> None:
        """From `now` on it is looked that often, at least."""
        self.calm_s = calm_s
        self._next_look = min(self._next_look, now + calm_s)

    # ------------------------------------------------------------------------------------ agents

    def _send(self, t: float) -> None:
        rng = self.world.rng
        for node in self.world.nodes:
            name = node.name
            if self._next_report[name] <= t or node.urgent:
                node.urgent = False
                self._next_report[name] = max(
                    t, min(t, self._next_report[name]) + self.interval_s * (0.98 + 0.04 * rng.random())
                )
                self._report(node, t)
            self._deliver_due(name, t)

    def _report(self, node: Node, t: float) -> None:
        rng = self.world.rng
        if not node.silent:
            said = report_of(self.world.report(node), self._readers[node.name])
            closely = self._closely.get(node.name)
            report = framed(said, t, self._memory, closely) if self.small else summed(said, t, self._memory)
            late_s = 3.0 + 12.0 * rng.random() if rng.random() < LATE_SHARE else 0.0
            if late_s:
                self.story.late.append((t, late_s))
            self._mail[node.name].append(_Mail(t, t + late_s, report))
        self._deliver_due(node.name, t)

    def _deliver_due(self, name: str, t: float) -> None:
        waiting = self._mail[name]
        while waiting and waiting[0].due <= t:
            mail = waiting.pop(0)
            self._deliver(mail, t)
            if self.world.rng.random() < TWICE_SHARE:
                self._deliver(mail, t)

    def _deliver(self, mail: _Mail, t: float) -> None:
        age_s = t - mail.made_at
        self.state.apply_report(replace(mail.report, age_s=age_s) if age_s else mail.report, t)
        name = mail.report.node
        self._closely[name] = name in self._close or name in self.state.unsure_of
        self.story.reports += 1

    # ------------------------------------------------------------------------------------ evidence

    def _ask(self, findings: list[Finding], t: float) -> None:
        rng = self.world.rng
        for finding in findings:
            for wanted in finding.wanted:
                if isinstance(wanted, StackRequest):
                    view = self.state.job_view(wanted.job_id, t)
                    if view is None:
                        continue
                    key = f"stacks:{wanted.job_id}.{view.job.restarts}"
                    every_s = wanted.apart_s if len(view.snapshots) < FIRST_DUMPS else LATER_DUMPS_EVERY_S
                    if wanted.early:
                        every_s = wanted.apart_s
                    if t - self._asked.get(key, float("-inf")) < every_s or key in self._out:
                        continue
                    if wanted.early and not self._early.acquire(key, t):
                        continue
                    self._asked[key] = t
                    self._out.add(key)
                    # The answers to reports of a job that is due are held back until there is something to ask.
                    wait_s = rng.uniform(0.3, 2.0) if wanted.early else rng.uniform(1.0, self.interval_s + 3.0)
                    self._later(t + wait_s, (key, wanted, t))
                else:
                    for name in wanted.nodes:
                        key = f"probe:{name}:{wanted.mount}"
                        if t - self._asked.get(key, float("-inf")) >= PROBE_EVERY_S:
                            self._asked[key] = t
                            stuck = any(name in m.stuck for m in self.world.mounts if m.path == wanted.mount)
                            wait_s = rng.uniform(0.2, self.interval_s + 0.5) + (10.0 if stuck else 0.0)
                            self._later(t + wait_s, (name, wanted.mount))

    def _later(self, due: float, what: object) -> None:
        self._answers.append((due, len(self._asked), what))

    def _answer(self, t: float) -> None:
        ready = [each for each in self._answers if each[0] <= t]
        self._answers = [each for each in self._answers if each[0] > t]
        for _, _, what in ready:
            if isinstance(what, tuple) and len(what) == 3:
                key, wanted, asked_at = what
                self._out.discard(key)
                self._dump(wanted, t, asked_at)
            elif isinstance(what, tuple):
                name, path = what
                node = next(n for n in self.world.nodes if n.name == name)
                mount = next((m for m in self.world.mounts if m.path == path), None)
                if mount is not None and not node.silent:
                    self._probe(node, mount, t)

    def _probe(self, node: Node, mount: Mount, t: float) -> None:
        self.state.apply_probe(node.name, self.world.probe(node, mount, t, wrote=True), t)

    def _dump(self, wanted: StackRequest, t: float, asked_at: float) -> None:
        job = next(each for each in self.world.jobs if each.job_id == wanted.job_id)
        self._dumps[job.job_id] = self._dumps.get(job.job_id, 0) + 1
        silent = {node.name for node in job.nodes if node.silent}
        seen = [r for r in job.ranks if not r.gone and not r.zombie and r.node not in silent]
        stacks = tuple(stack for rank in seen for stack in self._stacks(job, rank, t))
        for node in job.nodes:  # what the logs say by then comes with the answers
            self._report(node, t)
        self.state.runs.add_snapshot(
            job.job_id, job.restarts, stacks, tuple(sorted(silent)), t, asked_at if wanted.early else None
        )

    def _stacks(self, job: Job, rank: Rank, t: float) -> list[ProcessStack]:
        job.count(rank, t)
        of_workers = job.worker_look(rank)
        return [
            self._stack(job, rank, Role.RANK, rank, rank.look, looks.others_of(rank.number, rank.look)),
            *(self._stack(job, rank, Role.WORKER, each, of_workers, of_workers.others) for each in rank.workers),
        ]

    def _stack(
        self, job: Job, rank: Rank, role: Role, process: Rank | Worker, look: Look, others: tuple[WaitingThreads, ...]
    ) -> ProcessStack:
        frames = self.world.rng.choice(look.frames) if look.frames else ()
        return ProcessStack(
            node=rank.node,
            pid=process.pid,
            start_ticks=process.start_ticks,
            job_id=job.job_id,
            role=role,
            rank=rank.number,
            local_rank=rank.local,
            threads=() if look.undumpable or not frames else looks.threads_of(look, frames, process.pid),
            error=look.undumpable,
            state=look.state,
            cpu_s=process.cpu_s,
            main_cpu_s=process.cpu_s,
            io_bytes=int(process.io_bytes),
            syscall=look.syscall or look.call,
            others=others,
        )

    # ------------------------------------------------------------------------------------ judging

    def _look(self, t: float) -> None:
        self.story.looks += 1
        findings = self.judge.detect(t)
        if self.judge.incidents or any(finding.truth is Truth.BAD for finding in findings):
            self._alert_until = t + ALERT_S
        if any(finding.wanted for finding in findings):
            self._suspect_until = t + ALERT_S
            self._ask(findings, t)
        for change in self.judge.conclude(findings, t, t):
            incident = change.after
            if incident.fired_at is not None:
                self.story.incidents[incident.id] = incident
            if incident.state is IncidentState.RESOLVED:
                self.judge.settle(change, t)
        self._close = self.judge.close_nodes()
        self._closely.update(dict.fromkeys(self._close, True))  # pushed at once
        if self.world.records is not None:
            self._bring_records(self.world.records(), t)

    def _bring_records(self, records: tuple[RecordSet, ...], t: float) -> None:
        job, hang = self.world.jobs[0], IncidentKind.COLLECTIVE_HANG
        fired = [each.fired_at for each in self.story.incidents.values() if each.kind == hang]
        view = self.state.job_view(job.job_id, t)
        if fired and view is not None and not view.collectives and t >= (fired[0] or 0.0) + RECORDS_S:
            self.state.runs.add_records(job.job_id, job.restarts, records, t)


def write_trace(world: World, until: float, scene: Scene) -> Iterator[bytes]:
    """The lines of the scene's world as a trace v1, with its fault marked."""
    told: dict[str, tuple[object, float]] = {}
    due = {node.name: node.phase for node in world.nodes}
    t, marked = 0.0, False
    while t < until:
        t += 1.0
        world.advance(t)
        lines: list[Line] = []
        if scene.fault_at is not None and not marked:
            marked = True
            where = {"node": scene.fault_node} if scene.fault_node else {}
            lines.append(
                {
                    "t": scene.fault_at,
                    "kind": "fault",
                    "name": "simulated",
                    "job_id": scene.job.job_id,
                    **where,
                }
            )
        if world.slurm_answers:
            lines += slurm_trace(world.slurm(), t, told)
        for node in world.nodes:
            if due[node.name] <= t:
                due[node.name] += INTERVAL_S
                if not node.silent:
                    lines += trace_of(world.report(node), t)
        for line in lines:
            yield msgspec.json.encode(line) + b"\n"
