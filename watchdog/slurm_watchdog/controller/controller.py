"""The controller's tick: looks at everything, judges, writes what changed, hands over to decisions and messages."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from msgspec.structs import replace

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.capped import Shortage
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.decider import Decider
from slurm_watchdog.controller.actions.decision_inputs import CHUNK, DecisionPorts
from slurm_watchdog.controller.actions.job_observer import Tools
from slurm_watchdog.controller.actions.manager import Actions
from slurm_watchdog.controller.actions.owned_paths import OwnedPaths
from slurm_watchdog.controller.actions.silences import Silences
from slurm_watchdog.controller.evidence.collector import Collector
from slurm_watchdog.controller.evidence.reach import Answers, Reach, nobody_knows
from slurm_watchdog.controller.evidence.requests import EvidenceRequests
from slurm_watchdog.controller.health.cluster import BusyShare, Health, health, is_announced, pulses
from slurm_watchdog.controller.health.job import HealthInputs
from slurm_watchdog.controller.health.metrics import ControllerMetrics, UnreadableRows
from slurm_watchdog.controller.incident_news import IncidentNews
from slurm_watchdog.controller.incidents.hang_memory import REMEMBERED_S
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.node_history.ledger import NodeLedger
from slurm_watchdog.controller.node_history.node_tests import Tester
from slurm_watchdog.controller.policy.decision import why_blind
from slurm_watchdog.controller.policy.rules import mode_words
from slurm_watchdog.controller.run_records import RunRecords
from slurm_watchdog.controller.slow_nodes import SlowNodes
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report, State
from slurm_watchdog.notify.dispatcher import IncidentSources, Notifier
from slurm_watchdog.recording import entries
from slurm_watchdog.recording.recorder import Recorder
from slurm_watchdog.slurm.client import SlurmClient, SlurmUnavailable
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import REPORT

log = logging.getLogger(__name__)

PAUSE_FACTOR = 5.0  # So many ticks (and 5 s) between two of them mean that the controller itself was stalled.


@dataclass(frozen=True)
class Outside:
    """What is asked of others than Slurm and the agents, and who acts; as it is here nothing is asked."""

    answers: Answers = nobody_knows  # Asks whether a machine is there.
    tester: Tester | None = None  # Tests nodes; None: not here.
    commands: Callable[[], CommandQueue] = CommandQueue
    actions: Callable[[Tools], Actions] = Actions
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]  # Of an incident.


NOTHING_OUTSIDE = Outside()


class Controller:
    """Everything with a lifetime, and the tick that connects it. One event loop owns it."""

    def __init__(
        self,
        config: Config,
        *,
        journal: Journal,
        slurm: SlurmClient,
        notifier: Notifier,
        metrics: ControllerMetrics,
        recorder: Recorder | None = None,
        chunk: int = CHUNK,
        outside: Outside = NOTHING_OUTSIDE,
    ):
        self.config = config
        self._mode_words = mode_words(config)
        self.recorder = recorder
        self.journal = journal
        self.slurm = slurm
        self.notifier = notifier
        self.personal = False  # A `run` or `attach`, whose agents are their own user's.
        self.metrics = metrics
        self.commands = outside.commands()
        self.state = ClusterState(
            silent_after_s=config.controller.agent_silent_after,
            report_lifetime_s=config.report_lifetime_s,
            partitions=config.jobs.partitions,
            report_interval_s=config.agent.interval,
        )
        self.evidence = EvidenceRequests(self.state, self.commands, probe_deadline_s=config.agent.probe_deadline)
        self.reach = Reach(self.state, outside.answers)
        self.controller_id = uuid.uuid4().hex
        self.started_at = clock.wall()
        self.started_mono = clock.monotonic()
        if recorder is not None:
            self._begin_recording()
        self.warm_up_began = self.started_mono
        self.last_tick: float | None = None  # When a tick was last completed.
        self._last_began: float | None = None
        self._busy = BusyShare()
        self._newest: Health | None = None  # Of the newest tick, once asked for: all nodes may ask in one moment.
        metrics.refresh = self._show
        self._taken = cache(metrics.reports.labels)
        self.slurm_error: str | None = None
        self._unreadable = UnreadableRows(metrics)
        self.writer = JournalWriter(journal, self.state.left_out)
        # The monotonic clock of the controller that wrote the open incidents means nothing here.
        left_open = [
            replace(incident, pending_mono=self.started_mono, clear_mono=None, heard_mono=None)
            for incident in journal.load_open_incidents()
        ]
        self.state.require_node_ownership = True
        self.ledger = NodeLedger(
            journal,
            self.writer,
            lambda job_id: self.state.jobs.get(job_id),  # noqa: PLW0108 - each listing replaces the dictionary
            wall=clock.wall,
            renamed=config.policy.renamed_nodes,
        )
        journal.hang_places.prune(self.started_at - REMEMBERED_S)
        hangs = journal.hang_places.find()
        self._paths = OwnedPaths(config.jobs, self.state)
        settings = config.detectors.settings()[SlowJob]
        self.slow_nodes = SlowNodes(settings, self.ledger.record, clock.wall, self.ledger.events)
        self.runs = RunRecords(journal, self.writer, self.started_mono, self.started_at)
        self.judge = Judge(
            config, self.state, left_open, outside.new_id, metrics.detector_failed, hangs,
            self._paths.patience_s,
        )  # fmt: skip
        self.judge.suspects, self.judge.searches = self.ledger.suspects, self.slow_nodes.all
        self.state.filesystems.remember(left_open, self.started_mono)
        self.judge.detect(self.started_mono)
        self.collector = Collector(
            config, journal, self.writer, self.state, self.judge, self.evidence, notifier.diagnosed
        )
        self.news = IncidentNews(
            journal, self.writer, notifier, metrics, self.judge, self.state, self.collector, chunk, self.ledger,
            self._record_request,
        )  # fmt: skip
        self.actions = outside.actions(
            Tools(
                config=config,
                journal=journal,
                state=self.state,
                slurm=slurm,
                commands=self.commands,
                judgement=self.judge,
                collect=self.collector.operation,
                writer=self.writer,
                ended=self.news.ended,
                close_incident=self.news.close_incident,
                metrics=metrics,
                blind=self.blind,
                record=self.record,
                past=self.ledger,
                tester=outside.tester,
                why_left_alone=lambda job: self.decider.why_left_alone(job),  # noqa: PLW0108 - there is no decider yet
                on_failure=lambda decision: self.decider.action_failed(decision),  # noqa: PLW0108 - there is no decider yet
            )
        )
        self.decider = Decider(
            config,
            DecisionPorts(
                journal=journal,
                cluster=self.state,
                judgement=self.judge,
                executor=self.actions,
                news=self.news,
                blind=self.blind,
                new_incident_id=outside.new_id,
            ),
            chunk,
        )
        job_of = lambda job_id: self.state.jobs.get(job_id)  # noqa: E731, PLW0108 - each listing replaces the dictionary
        self.silences = Silences(
            journal, self.writer, notifier, lambda: self.judge.incidents, clock.wall, config.exceptions, job_of
        )
        notifier.attach(
            IncidentSources(
                job_of=job_of,
                firing=lambda: [
                    each for each in self.judge.incidents if is_announced(each) and not self.silences.silence_of(each)
                ],
                acting=self.actions.acting,
                silence_of=self.silences.silence_of,
                gpus_of=metrics.gpu_time.gpus_of,
                pulses=lambda: pulses(self.judge.view, self.judge.limits_s, clock.wall(), self.health()),
                count=lambda channel, outcome, number: metrics.notifications.labels(channel, outcome).inc(number),
            )
        )

    def accept(self, report: Report) -> Reply:
        """Takes over a report that has passed the door, and answers it."""
        _, reply = self.take(report, None)
        assert reply is not None  # nothing was said before
        return reply

    def take(self, report: Report, before: object) -> tuple[object, Reply | None]:
        """The same; None where the answer is as the one before. Returns what it depends on, too, to be handed in next
        time; None asks for an answer."""
        now = clock.monotonic()
        dropped = self.state.dropped
        outcome = self.state.apply_report(report, now)
        self._taken(outcome).inc()
        if outcome == "accepted" and not report.same_as:
            self.ledger.note_report(report)
        if self.state.dropped > dropped:
            self.metrics.reports.labels("wrong_job").inc()
        for result in report.results:
            self.commands.resolve(result)
        return self._answer_if_new(report.node, now, before)

    def hold(self, node: str, agent: tuple[str, str], said: State, before: object) -> tuple[object, Reply | None]:
        """Takes over that a node is as before, as `agent` (boot and agent id) says, and answers as `take` does."""
        now = clock.monotonic()
        if self.recorder is not None or not self.state.hold(node, agent, said, now):
            report = said.report(node, agent)
            self.record(REPORT + encode_report(report))
            return self.take(report, None)
        self._taken("accepted").inc()
        return self._answer_if_new(node, now, before)

    def _answer_if_new(self, node: str, now: float, before: object) -> tuple[object, Reply | None]:
        slurm_at = self.state.slurm_at
        is_fresh = slurm_at is not None and now - slurm_at <= self.judge.slurm_patience_s
        closely = node in self.commands.close or node in self.state.unsure_of
        basis = self.state.changes, is_fresh, closely
        return basis, None if basis == before and not self.commands.waits(node) else self._answer(node, now)

    def _answer(self, node: str, now: float) -> Reply:
        return Reply(
            commands=self.commands.pop(node),
            watch=tuple(
                watch
                for job, starts in self.state.jobs_on(node, now)
                for watch in self._paths.watches(job, starts, node)
            ),
            # Sent only once the jobs are known: what agents then report again belongs to a job.
            running=self.state.running_on(node, now, self.judge.slurm_patience_s),
            controller_id=self.controller_id if self.state.slurm_at is not None else "",
            closely=node in self.commands.close or node in self.state.unsure_of,
        )

    def record(self, what: bytes | entries.Value) -> None:
        """What comes in at this moment, for a recording, if there is one."""
        if self.recorder is not None:
            self.recorder.record(what)

    async def read_slurm(self) -> None:
        """One listing of jobs and nodes. No answer changes nothing and is said."""
        try:
            view = await self.slurm.read_view()
        except SlurmUnavailable as error:
            if self.slurm_error is None:
                what = "Slurm's answer cannot be used" if error.answered else "Slurm does not answer"
                log.warning("%s: %s", what, error)
            self.slurm_error = str(error)
            self.state.slurm_problem = error.reason if error.answered else ""
            self.record(entries.Answer(why_not=error.reason, answered=error.answered))
            return
        if self.slurm_error is not None:
            log.info("Slurm answers again")
        self.slurm_error = None
        now = clock.monotonic()
        self._unreadable.count(view)
        self.state.apply_slurm(view, now, clock.wall())
        self.ledger.note_drains(view.nodes)
        self.record(entries.Answer(view=view))

    def slurm_notes(self) -> list[str]:
        """What people should know of how Slurm is seen: less than everything, in another way, or not for long."""
        return [note for note in (self.state.slurm_partial, *self.slurm.notes()) if note]

    def blind(self, now: float) -> str | None:
        """Why this controller must not act now; None if it sees well."""
        return why_blind(
            journal_error=self.journal_error,
            slurm_age_s=None if self.state.slurm_at is None else now - self.state.slurm_at,
            slurm_patience_s=self.judge.slurm_patience_s,
            slurm_problem=self.state.slurm_problem,
            warming_s=self._warming_s(now),
        )

    def _warming_s(self, now: float) -> float | None:
        """For how long in all this controller only observes; None once it is warm. After a stop of its own what it
        knows is old, and a person's request may come before the tick that notices the stop."""
        warm_up_s = self.config.controller.warm_up
        stalled = self._last_began is not None and now - self._last_began > self._pause_s
        return warm_up_s if stalled or now - self.warm_up_began < warm_up_s else None

    @property
    def _pause_s(self) -> float:
        """Between the beginnings of two ticks: more, and it was stopped."""
        return max(5.0, PAUSE_FACTOR * self.config.controller.tick)

    def tick(self) -> None:
        """One judgement of everything, in one piece. Raises nothing: a detector that fails is counted, the
        others continue."""
        for _ in self.pieces():
            pass

    def pieces(self) -> Iterator[None]:
        """The same; where it yields others may run: thousands of jobs or incidents at once hold up no action and no
        report. What was concluded is written by then."""
        now = clock.monotonic()
        self._busy.note(now, clock.thread_cpu())
        began_before, self._last_began = self._last_began, now
        if began_before is not None and now - began_before > self._pause_s:
            log.warning("the controller was stalled for %.0f s: all timeouts start over", now - began_before)
            self.state.runs.grant_grace(now)
            self.state.forget_silence(now)
            self.warm_up_began = now
        with self.metrics.tick_duration.time():
            self.writer.catch_up()
            if self.recorder is not None:
                self._record_itself()
            self.record(entries.Tick())
            findings = yield from self.judge.detecting(clock.monotonic)
            now = clock.monotonic()
            self.evidence.serve(findings, now)
            self.reach.serve(self.judge.view)
            changes = self.judge.conclude(findings, now, clock.wall(), self.actions.acting())
            self.commands.look_closely(self.judge.close_nodes())
            yield from self.news.report(changes, now)
            self.runs.update(self.judge.view, clock.wall())
            self.slow_nodes.update(self.judge.view, self.judge.incidents, self.state.jobs)
            yield from self.decider.pieces(clock.monotonic())
            self.collector.store.prune(now)
            self.silences.expire()
            self.metrics.note_standstill(self.judge.view, self.judge.incidents)
        yield from self.judge.let_go()
        self.last_tick, self._newest = now, None
        self.metrics.last_tick.set(clock.wall())

    def _show(self) -> None:
        """Sets the figures of /metrics."""
        self.metrics.show(
            self.judge.view, self.judge.limits_s, self.judge.incidents, self.actions.operations(),
            lambda incident: self.silences.silence_of(incident) is not None,
        )  # fmt: skip
        self.metrics.show_health(self._newest_health(), self.judge.incidents)
        self.metrics.show_deliveries(self.notifier.deliveries())
        self.metrics.show_left_out(self.state.left_out.totals)
        self.metrics.show_crowds(self.left_out(clock.monotonic()))

    def _newest_health(self) -> Health:
        if self._newest is None:
            self._newest = self.health(tick_age_s=None if self.last_tick is None else 0.0)
        return self._newest

    def _record_itself(self) -> None:
        """What decisions depend on and neither a report nor a listing says, at this moment."""
        paused, drained, problem = None, 0, self.journal_error
        try:
            paused, drained = self.journal.paused(), len(self.journal.node_entries("drained"))
        except JournalError as error:
            problem = str(error)
        self.record(
            entries.State(
                paused=None if paused is None else paused[0],
                journal_error=problem,
                acting=tuple(self.actions.subjects()),
                drained=drained,
            )
        )

    def _record_request(self, asked: entries.Request) -> None:
        self._record_itself()  # someone may have paused it since the last tick
        self.record(asked)

    def _begin_recording(self) -> None:
        self.record(entries.Begin(release=__version__, settings=entries.settings_of(self.config)))
        self.commands.on_ask = lambda node, command: self.record(entries.Asked(node=node, command=command))

    @property
    def journal_error(self) -> str | None:
        """Why the journal cannot be written, a sentence; None while it can."""
        return self.writer.error

    def health(self, *, tick_age_s: float | None = None) -> Health:
        """How everything is now: what every surface shows. `tick_age_s`: since the last complete tick, where
        the caller knows better."""
        now = clock.monotonic()
        if tick_age_s is None and self.last_tick is not None:
            tick_age_s = now - self.last_tick
        try:
            paused = self.journal.paused()
        except JournalError as error:
            paused = None
            self.writer.failed(error)
        return health(
            HealthInputs(
                view=self.judge.view,
                limits_s=self.judge.limits_s,
                incidents=self.judge.incidents,
                mode=self._mode_words,
                tick_age_s=tick_age_s,
                journal_error=self.journal_error,
                slurm_error=self.slurm_error,
                slurm_patience_s=self.judge.slurm_patience_s,
                slurm_notes=self.slurm_notes(),
                patience_s=self.judge.patience_s,
                paused=None if paused is None else (paused[0], paused[1]),
                warming_up=self._warming_s(now) is not None,
                acting=self.actions.under_way(clock.wall()),
                restarting=self.actions.restarting(),
                deliveries=self.notifier.deliveries(),
                busy_share=self._busy.share(),
                personal=self.personal,
            )
        )

    def left_out(self, now: float) -> tuple[Shortage, ...]:
        """What there was no room for lately; a `run` or `attach` says nothing of other users."""
        found = self.state.left_out.lately(now)
        return tuple(each for each in found if not self.personal or each.uid in (None, os.getuid()))

    def healthy(self) -> tuple[bool, str]:
        """Whether a whole tick was completed lately by a controller that can see; with the headline that
        everybody is shown."""
        good, why = self._sees()
        if not good:
            return good, why
        newest = self._newest_health()
        return good, f"{newest.level}: {newest.headline}"

    def _sees(self) -> tuple[bool, str]:
        now = clock.monotonic()
        if self.last_tick is None or now - self.last_tick > max(10.0, 10 * self.config.controller.tick):
            return False, "no complete tick lately"
        if self.journal_error is not None:
            return False, f"the journal cannot be written: {self.journal_error}"
        age_s = self.judge.view.slurm_age_s
        if age_s is None or age_s > self.judge.slurm_patience_s:
            what = "Slurm's answer cannot be used" if self.state.slurm_problem else "Slurm does not answer"
            return False, f"{what}: {self.slurm_error or 'no listing yet'}"
        return True, "watching"
