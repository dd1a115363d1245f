"""Reports what became of incidents: to the journal, its timelines, the notifier, the metrics and the log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.controller.actions.decision_inputs import TOGETHER_FROM
from slurm_watchdog.controller.evidence.collector import Collector
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.incidents.judge import IncidentChange, Judge
from slurm_watchdog.controller.node_history.ledger import NodeLedger
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.actions import Action, ActionRun, Decision
from slurm_watchdog.model.incidents import Incident, IncidentState
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.recording.entries import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IncidentNews:
    """Everything that is written and announced of incidents, with what people and actions change about them."""

    journal: Journal
    writer: JournalWriter
    notifier: Notifier
    metrics: ControllerMetrics
    judge: Judge
    state: ClusterState
    collector: Collector
    chunk: int
    ledger: NodeLedger
    record_request: Callable[[Request], None]  # Writes an operator's request into the recording, if there is one.

    def report(self, changes: Iterable[IncidentChange], now: float) -> Iterator[None]:
        """All that has changed in this tick, in pieces."""
        # What is explained now comes before its cause is announced: the message is handed over.
        left = sorted(filter(_is_news, changes), key=lambda change: not change.is_explained)
        while left:
            self._report_some(left[: self.chunk], now)
            left = left[self.chunk :]
            if left:
                yield
                # An action that has ended meanwhile has ended its incident, which is written as such.
                open_ones, now = {incident.id for incident in self.judge.incidents}, clock.monotonic()
                left = [each for each in left if each.is_over or each.after.id in open_ones]

    def _report_some(self, changes: Sequence[IncidentChange], now: float) -> None:
        """Where they are many, the disk is waited for once."""
        if len(changes) <= TOGETHER_FROM:
            for change in changes:
                self._report_change(change, now)
            return
        left = deque(changes)

        def report_all() -> None:
            while left:
                self._report_change(left.popleft(), now)

        self.writer.together(report_all)
        for change in left:  # the journal could not even be opened
            self._report_change(change, now)

    def _report_change(self, change: IncidentChange, now: float) -> None:
        """Writes and announces what changed about one incident."""
        before, incident = change.before, change.after
        fired = incident.state is IncidentState.FIRING and (before is None or before.state is not incident.state)
        resolved = change.is_over
        if _is_news(change):
            self.writer.write_or_queue(lambda: self.journal.save_incident(incident))
            self.ledger.note_incident(incident)
        if fired:
            self.metrics.incidents_total.labels(incident.kind).inc()
            log.warning("%s fires: %s", incident.kind, incident.summary)
            self.writer.add_note(incident, f"fires: {incident.summary}")
            if (place := self.judge.hangs.place(incident.id)) is not None:
                self.writer.write_or_queue(lambda: self.journal.hang_places.save(place))
            for said in self.judge.hangs.said(incident.id):
                self.writer.add_note(incident, said)
            self.writer.write_or_queue(lambda: self.notifier.opened(incident))
            self._keep_evidence(incident, now)
        if resolved:
            log.warning("%s is over: %s", incident.kind, incident.resolution)
            self.writer.add_note(incident, f"resolved: {incident.resolution}")
            self.writer.write_or_queue(lambda: self.notifier.resolved(incident))
            self.judge.settle(change, now)
        firing_on = before is not None and before.state is incident.state is IncidentState.FIRING
        if before is not None and firing_on and before.inhibited_by != incident.inhibited_by:
            self.writer.add_note(
                incident, f"explained by incident {incident.inhibited_by}" if incident.inhibited_by else "stands alone"
            )
            self._report_explained(before, incident)

    def _report_explained(self, before: Incident, incident: Incident) -> None:
        """One fault, one message: where another incident explains this one, that one takes its message over;
        and gives it back."""
        if incident.inhibited_by is None:
            self.writer.write_or_queue(lambda: self.notifier.opened(incident))
        elif before.inhibited_by is None:
            cause = self.judge.incidents.get(incident.inhibited_by)
            self.writer.write_or_queue(lambda: self.notifier.explained(incident, cause))

    def _keep_evidence(self, incident: Incident, now: float) -> None:
        """What is known of its jobs at once, and what their nodes can tell, before anything is done: it dies
        with the job."""
        views = {}
        for job_id in incident.job_ids:
            view = self.state.job_view(job_id, now)
            if view is not None:
                views[job_id] = view
                if not self.writer.is_behind:
                    self.collector.store.keep_view(incident, view)
        self.collector.on_fire(incident, now, views)

    def close_incident(self, incident: Incident, why: str) -> None:
        """Ends an incident because its action has ended, or was refused: everybody who got a message that it began
        gets one."""
        over = replace(incident, state=IncidentState.RESOLVED, resolved_at=clock.wall(), resolution=why)
        self.judge.close(over)
        self._report_change(IncidentChange(before=incident, after=over), clock.monotonic())

    def add_incident(self, incident: Incident) -> None:
        """Opens the incident of a person's request, which no detector finds. It is in the journal already."""
        self.judge.add(incident)

    def requested(self, incident: Incident, request: Request) -> None:
        """A person has asked for a restart."""
        self.record_request(request)
        self.writer.add_note(incident, incident.summary)
        self.writer.write_or_queue(lambda: self.notifier.opened(incident))

    def decided(self, incident: Incident, decision: Decision) -> None:
        """A decision is in the journal: counts it, and reports it."""
        self.metrics.decisions.labels(decision.action, decision.verdict, decision.by).inc()
        what = f"{decision.action} {decision.verdict}" if decision.action is not Action.NONE else "no action"
        sentence = f"{what} by {decision.by}: {decision.reason}"
        log.warning("incident %s, job %s: %s", incident.id, ",".join(incident.job_ids) or incident.subject, sentence)
        self.writer.add_note(incident, sentence)
        self.writer.write_or_queue(lambda: self.notifier.decided(incident, decision))

    def ended(self, incident: Incident, run: ActionRun) -> None:
        """An action has ended: reports it, and what it showed of the nodes that the job was kept from."""
        if run.end is not None and run.end.ok and run.end.resumed_at_step is not None:
            self.ledger.note_restart(incident, run.decision.blamed)
        self.notifier.ended(incident, run)

    def journal_failed(self, error: JournalError) -> None:
        """The journal has failed a decision: nothing is done until it works."""
        self.writer.failed(error)


def _is_news(change: IncidentChange) -> bool:
    """Whether there is anything to write. Of what is only suspected nothing is."""
    firing = change.after.state is IncidentState.FIRING
    return change.is_over or (firing and _differs(change.before, change.after))


def _differs(before: Incident | None, incident: Incident) -> bool:
    """Whether more than the seconds in its sentences has changed: only then it is worth a write to the disk."""

    def essence(of: Incident) -> tuple[object, ...]:
        who = tuple((c.node, c.rank, c.pid, c.path) for c in of.culprits)
        return of.state, who, of.job_ids, of.jobs_now, of.inhibited_by, of.actionable, of.exclude_nodes, of.runs

    return before is None or essence(before) != essence(incident)
