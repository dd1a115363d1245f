"""Drives a simulated world through a real controller, under the world's clock.

Reports are frames and Slurm's answers are listings, as in a recording; commands (stacks, probes) are answered in the
next frame, as agents would. With a recorder the same run can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.controller import PAUSE_FACTOR
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import ProcessStack, WaitingThreads
from slurm_watchdog.model.incidents import Finding, Incident, IncidentKind, StackRequest, Truth
from slurm_watchdog.model.observations import MountProbe, Role
from slurm_watchdog.model.protocol import Command, CommandResult, DumpStacks, ProbeMount, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.recording.entries import Entry
from slurm_watchdog.recording.recorder import Recorder
from slurm_watchdog.replay.player import Player
from tests.accuracy import looks
from tests.accuracy.feed import Reader, report_of
from tests.accuracy.looks import Look
from tests.accuracy.training import Job, Node, Rank, Worker
from tests.accuracy.world import INTERVAL_S, Mount, World
from tests.builders.entries import begin, frame, listing, no_answer, tick
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
    """One world, one controller."""

    def __init__(
        self, world: World, config: Config, *, interval_s: float = INTERVAL_S, calm_s: float = INTERVAL_S,
        recorder: Recorder | None = None, judge: type[Judge] = Judge, small: bool = True,
    ):  # fmt: skip
        """`interval_s` between two reports of a node; `calm_s` between two looks while nothing is wrong. `small`: agents
        send small reports, as they do; else each is whole."""
        self.world, self.config, self.small = world, config, small
        self.interval_s, self.calm_s = interval_s, calm_s
        self.story = Story()
        self._recorder, self._judge_type = recorder, judge
        self._next_report = {node.name: node.phase for node in world.nodes}
        self._mail: dict[str, list[_Mail]] = {node.name: [] for node in world.nodes}
        self._readers = {node.name: Reader() for node in world.nodes}
        self._memory = Memory()
        self._closely: dict[str, bool] = {}  # As each node was answered last.
        self._asked: list[tuple[str, Command]] = []
        self._findings: list[Finding] = []
        self._answers: list[tuple[float, list[tuple[str, Command]]]] = []
        self._slurm_at = -1000.0
        self._alert_until = self._suspect_until = float("-inf")
        self._next_look = 0.0

    def run(self, until: float, done: object = None) -> Story:
        """Until `until`, or until `done(story, now)` says that all is known."""
        t, tick_s = 0.0, self.config.controller.tick
        with Player(seldom(self.config, self.calm_s), commands=CommandQueue, recorder=self._recorder) as self.player:
            self._begin()
            while t < until:
                t = self._next_moment(t, tick_s, until)
                self._step(t)
                if callable(done) and done(self.story, t):
                    break
            self.story.ended_at = t
            failures = self.controller.metrics.detector_failures.collect()
            self.story.failures += [
                s.labels["kind"] for each in failures for s in each.samples if s.value and s.name.endswith("_total")
            ]
        return self.story

    def _begin(self) -> None:
        self.player.take(begin(0.0))
        self.controller = self.player.controller
        self.judge, commands, evidence = self.controller.judge, self.controller.commands, self.controller.evidence
        self.judge.__class__ = self._judge_type
        record, serve = commands.on_ask, evidence.serve

        def note_asked(node: str, command: Command) -> None:
            record(node, command)
            self._asked.append((node, command))

        def note_findings(findings: Iterable[Finding], now: float) -> None:
            self._findings = list(findings)
            serve(self._findings, now)

        commands.on_ask = note_asked
        evidence.serve = note_findings  # type: ignore[method-assign]

    def _take(self, entry: Entry) -> Reply | None:
        reply = self.player.take(entry)
        self._note_asked(entry.at)
        return reply

    def _next_moment(self, t: float, tick_s: float, until: float) -> float:
        if t < self._alert_until or self._answers:
            return t + tick_s
        due = min(*self._next_report.values(), self._next_look, self._slurm_at + self.config.slurm.poll_interval)
        ticks = max(1, -int(-(due - t) // tick_s))
        return min(until, t + ticks * tick_s)

    def _step(self, t: float) -> None:
        self.world.advance(t)
        if t - self._slurm_at >= self.config.slurm.poll_interval:
            self._slurm_at = t
            view = self.world.slurm() if self.world.slurm_answers else None
            self._take(listing(t, view.jobs, view.nodes) if view is not None else no_answer(t))
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

    def _report(self, node: Node, t: float, results: tuple[CommandResult, ...] = ()) -> None:
        rng = self.world.rng
        if not node.silent:
            said = replace(report_of(self.world.report(node), self._readers[node.name]), results=results)
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
        entry = frame(replace(mail.report, age_s=age_s) if age_s else mail.report, t)
        if self._recorder is not None:
            self.player.advance(t, t)
            self._recorder.record(entry.what)
        reply = self._take(entry)
        if reply is not None and reply.closely is not None:
            self._closely[mail.report.node] = reply.closely
        self.story.reports += 1

    # ------------------------------------------------------------------------------------ evidence

    def _note_asked(self, t: float) -> None:
        """What nodes have been asked is answered some time later, about a job by all of them together."""
        rng, asked, self._asked = self.world.rng, self._asked, []
        early = {w.job_id for each in self._findings for w in each.wanted if isinstance(w, StackRequest) and w.early}
        jobs: dict[str, list[tuple[str, Command]]] = {}
        for node, command in asked:
            if isinstance(command, DumpStacks):
                jobs.setdefault(command.job_id, []).append((node, command))
            elif isinstance(command, ProbeMount):
                stuck = any(node in mount.stuck for mount in self.world.mounts if mount.path == command.mount)
                wait_s = rng.uniform(0.2, self.interval_s + 0.5) + (10.0 if stuck else 0.0)
                self._answers.append((t + wait_s, [(node, command)]))
            else:
                self._answers.append((t + 1.0, [(node, command)]))
        for job_id, places in jobs.items():
            # The answers to reports of a job that is due are held back until there is something to ask.
            wait_s = rng.uniform(0.3, 2.0) if job_id in early else rng.uniform(1.0, self.interval_s + 3.0)
            self._answers.append((t + wait_s, places))

    def _answer(self, t: float) -> None:
        ready = [places for due, places in self._answers if due <= t]
        self._answers = [each for each in self._answers if each[0] > t]
        for places in ready:
            for name, command in places:
                node = next(each for each in self.world.nodes if each.name == name)
                if not node.silent:  # what the logs say by then comes with the answer
                    self._report(node, t, (self._result(node, command, t),))

    def _result(self, node: Node, command: Command, t: float) -> CommandResult:
        result = CommandResult(command_id=command.id, ok=False, error="a simulated agent has none of that")
        if isinstance(command, DumpStacks):
            job = next(each for each in self.world.jobs if each.job_id == command.job_id)
            return replace(result, ok=True, error=None, stacks=self._dump(job, node, t))
        mount = next((each for each in self.world.mounts if each.path == getattr(command, "mount", "")), None)
        return result if mount is None else replace(result, ok=True, error=None, probe=self._probe(node, mount, t))

    def _probe(self, node: Node, mount: Mount, t: float) -> MountProbe | None:
        return self.world.probe(node, mount, t, wrote=True)

    def _dump(self, job: Job, node: Node, t: float) -> tuple[ProcessStack, ...]:
        seen = [rank for rank in job.ranks if not rank.gone and not rank.zombie and rank.node == node.name]
        return tuple(stack for rank in seen for stack in self._stacks(job, rank, t))

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
        self._findings = []
        self._take(tick(t))
        self._closely.update(dict.fromkeys(self.controller.commands.close, True))  # pushed at once
        if self.judge.incidents or any(finding.truth is Truth.BAD for finding in self._findings):
            self._alert_until = t + ALERT_S
        if any(finding.wanted for finding in self._findings):
            self._suspect_until = t + ALERT_S
        for incident in self.judge.incidents:
            if incident.fired_at is not None:
                self.story.incidents[incident.id] = incident
        if self.world.records is not None:
            self._bring_records(self.world.records(), t)

    def _bring_records(self, records: tuple[RecordSet, ...], t: float) -> None:
        job, hang, state = self.world.jobs[0], IncidentKind.COLLECTIVE_HANG, self.controller.state
        fired = [each.fired_at for each in self.story.incidents.values() if each.kind == hang]
        view = state.job_view(job.job_id, t)
        if fired and view is not None and not view.collectives and t >= (fired[0] or 0.0) + RECORDS_S:
            state.runs.add_records(job.job_id, job.restarts, records, t)


def seldom(config: Config, calm_s: float) -> Config:
    """For a controller that ticks so seldom on purpose: it was not stopped in between."""
    return replace(
        config, controller=replace(config.controller, tick=max(config.controller.tick, 1.4 * calm_s / PAUSE_FACTOR))
    )
