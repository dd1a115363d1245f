"""Given a cluster and its jobs, when something is found to be wrong, then this was done. What a test says, in
the words of its title.

The controller is the real one, on simulated time, with its journal in a file; only what the detectors would
say is given by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.journal.database import Database, JournalError
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import ActionEnd, ActionRun, Decision, Operation, OperationOutcome, Verdict, Wish
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.recording.recorder import Recorder
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import REPORT
from tests.behaviour.cluster import EPOCH, Job, Scripted
from tests.simulation.timeline import Killed, SimLoop, Timeline

TICK_S = 5.0
QUICK = """
controller: {warm_up: 0s}
slurm: {poll_interval: 5s, deadline: 5s}
ladder: {step_limit: 30s}
"""
ACT = "mode: act\npolicy: {cooldown: 1min}\n" + QUICK


class FullDisk(Database):
    """The database of a journal whose disk may be full."""

    def __init__(self, url: str, journal: DyingJournal) -> None:
        super().__init__(url)
        self._journal = journal

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        if self._journal.full:
            raise JournalError("The journal has no room: its disk is full.")
        with super().transaction() as sql:
            yield sql


class DyingJournal(Journal):
    """The real journal of a controller that may be killed before or after one of its writes."""

    dies: str = ""
    """`before intent requeue_hold`, `after outcome release`; empty: it lives."""
    hooks: dict[str, Callable[[], object]]
    """The same moments -> what happens then, once."""

    full: bool = False
    """Its disk is full."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lambda url: FullDisk(url, self))

    def _write(self, stage: str, work: Any) -> None:
        for moment in ("before", "after"):
            if moment == "after":
                work()
            self.hooks.pop(f"{moment} {stage}", lambda: None)()
            if self.dies == f"{moment} {stage}":
                raise Killed

    def add_decision(self, decision: Decision) -> None:
        self._write("decision", lambda: super(DyingJournal, self).add_decision(decision))

    def operation_intent(
        self, decision_id: str, operation: Operation, attempt: int, at: float, detail: str = ""
    ) -> None:
        self._write(
            f"intent {operation}",
            lambda: super(DyingJournal, self).operation_intent(decision_id, operation, attempt, at, detail),
        )

    def operation_outcome(
        self,
        decision_id: str,
        operation: Operation,
        attempt: int,
        outcome: OperationOutcome,
        at: float,
        detail: str,
    ) -> None:
        self._write(
            f"outcome {operation}",
            lambda: super(DyingJournal, self).operation_outcome(decision_id, operation, attempt, outcome, at, detail),
        )

    def end_action(self, decision_id: str, end: ActionEnd) -> None:
        self._write("end", lambda: super(DyingJournal, self).end_action(decision_id, end))


class Story:
    """One scenario, from its first to its last sentence."""

    cluster_type: type[Scripted] = Scripted
    journal_type: type[DyingJournal] = DyingJournal
    recorder: Recorder | None = None
    """Of a scenario that is recorded."""

    def __init__(self, directory: Path, config: str = ACT) -> None:
        self.timeline = Timeline()
        self.cluster = self.cluster_type(now=lambda: self.timeline.now)
        self.cluster.add_nodes("n1", "n2", "n3", "n4")
        self.config = parse_config(config)
        self._url = f"sqlite:///{directory / 'journal.sqlite'}"
        self._sequence = self._found = 0
        self._known = ""
        """The controller that the agents have spoken to."""
        self._clock = ExitStack()
        self._clock.enter_context(
            clock.simulated(lambda: 1000.0 + self.timeline.now, lambda: EPOCH + self.timeline.now)
        )
        self._lives_on = True
        self.journal: DyingJournal
        self._start()
        self._world()

    def close(self) -> None:
        self._lives_on = False
        self.loop.bury()
        self.journal.close()
        self._clock.close()

    # ---------------------------------------------------------------------------------------- given

    def job(self, job_id: str = "7", *, step: int = 50, saved: int = 0, **how: Any) -> Job:
        """A job that has been running for a while, at `step`, with a checkpoint of `saved`."""
        job = Job(job_id, saved=saved, **how)
        self.cluster.jobs[job_id] = job
        hangs, hears = job.hangs, job.hears_switch
        self.cluster.start(job)
        job.hears_switch, job.hangs = hears, False
        job.step = job.told = max(saved, step - 7)
        self.passes(seconds=14)
        job.hangs = hangs
        self.passes(seconds=6)
        return job

    def waiting_job(self, job_id: str, **how: Any) -> Job:
        job = Job(job_id, **how)
        self.cluster.jobs[job_id] = job
        return job

    # ---------------------------------------------------------------------------------------- when

    def finds(
        self,
        kind: IncidentKind,
        job: Job,
        *,
        blames: str = "",
        mounts: tuple[str, ...] = (),
        actionable: bool = True,
        when: Callable[[], object] = lambda: None,
    ) -> Incident:
        """A detector is sure of something about a job, and the controller looks at it."""
        self._found += 1
        incident = Incident(
            id=f"i{self._found}",
            kind=kind,
            subject=f"job:{job.id}",
            state=IncidentState.FIRING,
            severity=Severity.CRITICAL,
            job_ids=(job.id,),
            jobs_now=(job.id,),
            opened_at=clock.wall(),
            pending_mono=clock.monotonic(),
            fired_at=clock.wall(),
            detected_after_s=0.0,
            summary=f"job {job.id}: {kind}",
            runs=((job.id, job.restarts),),
            actionable=actionable,
            exclude_nodes=tuple(blames.split()),
            culprits=tuple(Culprit(node=node) for node in blames.split()),
            mounts=mounts,
        )
        self.controller.judge.add(incident)
        self.journal.save_incident(incident)
        when()
        self.passes(seconds=2 * TICK_S)
        return incident

    def resolves(self, incident: Incident) -> None:
        """What it is about is over, by the detector that found it."""
        over = replace(incident, state=IncidentState.RESOLVED, resolved_at=clock.wall())
        judge = self.controller.judge
        judge.incidents.renew(each for each in judge.incidents if each.id != incident.id)
        self.journal.save_incident(over)

    def judges(self) -> list[Incident]:
        """What the detectors say now becomes incidents: those that are open then."""
        judge, acting = self.controller.judge, self.controller.actions.acting()
        now = clock.monotonic()
        for change in judge.conclude(judge.detect(now), now, clock.wall(), acting):
            self.journal.save_incident(change.after)
        return list(judge.incidents)

    def operator_restarts(
        self,
        job: Job,
        *,
        exclude: str = "",
        now: bool = False,
        wish: Wish = Wish.RESTART,
        within_s: float | None = None,
    ) -> Decision:
        """A person types `slurm-watchdog restart`, with `--now` or without, or `save-all`."""
        decisions: list[Decision] = []

        async def ask() -> None:
            seen = await self.cluster.read_job(job.id)
            assert isinstance(seen, SlurmJob)
            ask = self.controller.decider.ask_restart
            more: dict[str, Any] = {"at_once": now, "wish": wish, "within_s": within_s}
            decisions.append(ask(seen, tuple(exclude.split()), "a test", "root", **more)[1])

        self._run(ask())
        return decisions[0]

    def operator_cancels(self, job: Job) -> str | None:
        """`restart --cancel`. Returns why it cannot be."""
        return self.controller.actions.abandon(job.id, "root")

    def passes(self, *, seconds: float = 0.0, minutes: float = 0.0, hours: float = 0.0) -> None:
        """Time goes by. A controller that dies meanwhile is started again ten seconds later."""
        until = self.timeline.now + seconds + 60 * minutes + 3600 * hours
        while self.timeline.now < until:
            self._run(self._live(until))

    def controller_is_killed(self) -> None:
        """kill -9, and systemd starts it again."""
        self.loop.bury()
        self.journal.close()
        self._start()

    def at(self, when: str, what: Callable[[], object]) -> None:
        """Something happens at that write of the journal: `after decision`."""
        self.journal.hooks[when] = what

    def controller_dies(self, when: str) -> None:
        """At its next write of this kind."""
        self.journal.dies = when

    # ---------------------------------------------------------------------------------------- then

    @property
    def done(self) -> list[str]:
        """What was asked of Slurm, in order."""
        return self.cluster.done

    def decisions(self, incident: Incident) -> list[Decision]:
        return self.journal.decisions(incident.id)

    def decided(self, incident: Incident) -> tuple[str, str]:
        """(verdict, by) of the newest decision about it."""
        newest = self.decisions(incident)[-1]
        return str(newest.verdict), newest.by

    def why(self, incident: Incident) -> str:
        return self.decisions(incident)[-1].reason

    def action(self, about: Incident | Decision) -> ActionRun:
        """The newest action that was taken."""
        incident_id = about.incident_id if isinstance(about, Decision) else about.id
        return self.journal.actions(incident_id)[-1]

    def end(self, about: Incident | Decision) -> ActionEnd:
        found = self.action(about).end
        assert found is not None, [f"{r.operation} {r.outcome} {r.detail}" for r in self.action(about).records]
        return found

    def operations(self, about: Incident | Decision) -> list[str]:
        """Rung and outcome of each, in order."""
        return [f"{record.operation} {record.outcome}" for record in self.action(about).records]

    def told(self, incident: Incident) -> str:
        """The timeline of the incident, as `explain` shows it."""
        return "\n".join(text for _, text in self.journal.timeline(incident.id))

    def counted(self, by: str) -> float:
        """Decisions that this guard took away, as the metrics have them."""
        return sum(
            sample.value
            for family in self.controller.metrics.decisions.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels.get("by") == by
            and sample.labels["verdict"] == Verdict.SUPPRESSED
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------- inside

    def _start(self) -> None:
        self.loop = SimLoop(self.timeline)
        self.journal = self.journal_type(self._url)
        self.journal.hooks = {}
        notifier = Notifier(self.journal.outbox)

        async def build() -> None:
            self.controller = Controller(
                self.config,
                journal=self.journal,
                slurm=self.cluster,
                notifier=notifier,
                metrics=ControllerMetrics(),
                recorder=self.recorder,
            )
            await self.controller.read_slurm()
            self.controller.actions.resume_open_actions()

        self._run(build())

    def _run(self, work: Any) -> None:
        try:
            self.loop.run_until_complete(work)
        except Killed:
            work.close()
            self.timeline.advance(self.timeline.now + 10.0)
            self.controller_is_killed()

    async def _live(self, until: float) -> None:
        while self.timeline.now < until:
            await self.controller.read_slurm()
            now = clock.monotonic()
            self.controller.judge.detect(now)
            self.controller.decider.decide(now)
            await asyncio.sleep(min(TICK_S, until - self.timeline.now))

    def _world(self) -> None:
        """A second of the cluster, and every fifth one a report of each node."""
        if not self._lives_on:
            return
        self.cluster.live()
        self._sequence += 1
        if self._sequence % 5 == 0:
            again, self._known = self._known != self.controller.controller_id, self.controller.controller_id
            for node in self.cluster.nodes:
                if node not in self.cluster.silent:
                    report = self.cluster.report(node, self._sequence, "a", again=again)
                    self.controller.record(REPORT + encode_report(report))
                    for command in self.controller.accept(report).commands:
                        self.cluster.obey(node, command)
        self.timeline.after(1.0, self._world)
