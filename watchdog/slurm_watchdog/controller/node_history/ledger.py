"""What is remembered of nodes: writes down what happens to them, and knows what that makes of each.

One event loop owns it. The journal has everything; in memory is what still weighs something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.text import one_line
from slurm_watchdog.controller.node_history.suspicion import (
    DAY_S,
    FORGOTTEN_S,
    MAX_WHAT,
    SAME_S,
    Counted,
    blamed,
    by_node,
    events_of,
    suspicions,
)
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.knowledge.drain_reasons import DrainMeaning, drain_meaning
from slurm_watchdog.knowledge.kernel_causes import ADAPTER
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.node_events import LINK_PLACE, OUR_DRAIN, NodeEvent, NodeEventKind, NodeSuspicion
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import is_drained

FADES_S = 60.0
KEPT_S = 2 * 365 * DAY_S  # Older events are dropped from the journal: nothing is left of their weight.


class NodeLedger:
    """See the module."""

    def __init__(
        self,
        journal: Journal,
        writer: JournalWriter,
        job_of: Callable[[str], SlurmJob | None],
        *,
        wall: Callable[[], float],
        renamed: Mapping[str, str],
    ):
        """`renamed`: a node's name before -> its name now. Raises JournalError."""
        self._journal, self._writer, self._job_of, self._wall = journal, writer, job_of, wall
        self._renamed = renamed
        self._events: dict[str, NodeEvent] = {}
        self._of_incident: dict[str, set[str]] = {}  # Incident -> the keys of its events, withdrawn ones too.
        self._places = set[str]()  # Parts of nodes that have a history.
        self._keep_all(journal.node_events.since(wall() - FORGOTTEN_S))
        self._gpu_nodes: dict[str, str] = {}  # Of GPUs that have a history: where each was seen last.
        self._nodes: dict[str, list[Counted]] | None = None
        self._suspects: tuple[float, tuple[NodeSuspicion, ...]] | None = None
        """When they were computed last, and what came of it."""
        self._forgotten_at = 0.0

    def record(self, event: NodeEvent) -> None:
        """Writes an event down. The same key twice is one event, as it was given last."""
        event = replace(event, what=one_line(event.what, MAX_WHAT))
        if self._events.get(event.key) == event:
            return
        self._keep_all((event,))
        self._nodes = self._suspects = None
        self._writer.write_or_queue(lambda: self._journal.node_events.save(event))
        self._forget()

    def _keep_all(self, events: Iterable[NodeEvent]) -> None:
        for event in events:
            self._events[event.key] = event
            self._of_incident.setdefault(event.incident_id, set()).add(event.key)
            self._places.add(event.place)

    def note_incident(self, incident: Incident) -> None:
        """An incident is, or has become, something else: the events that it made follow it. What another
        incident has once explained stays withdrawn."""
        job = self._job_of_incident(incident)
        found = events_of(incident, _chain(job), compared=job is not None and len(job.nodes) > 1)
        events = {each.key: each for each in found}
        for known in [self._events[key] for key in self._of_incident.get(incident.id, set()) - events.keys()]:
            if known.kind == incident.kind and not known.withdrawn_why:
                by_other = incident.inhibited_by
                why = f"incident {by_other} explains it" if by_other else "its incident now names another node"
                self.record(replace(known, withdrawn_at=self._wall(), withdrawn_why=why))
        for key, event in events.items():
            known_one = self._events.get(key)
            if known_one is None:
                self.record(event)
            elif not known_one.withdrawn_why.startswith("incident "):
                self.record(replace(event, chain=known_one.chain or event.chain))

    def note_restart(self, incident: Incident, left_out: Iterable[str]) -> None:
        """A job of the incident runs well again, and was started without these nodes."""
        job, without = self._job_of_incident(incident), set(left_out)
        for node, place in blamed(incident) if job is not None else ():
            if job is not None and node in without and node not in job.nodes:
                key, what = f"helped:{incident.id}:{node}", f"job {job.job_id} made new steps without {node}"
                about = {"place": place, "job_id": job.job_id, "chain": _chain(job), "incident_id": incident.id}
                self._add(key, node, NodeEventKind.RESTART_HELPED, self._wall(), what, **about)

    def note_drains(self, nodes: Iterable[SlurmNode]) -> None:
        """Slurm's newest listing: who was drained by someone else, and for a fault of the node."""
        for node in nodes:
            at, ours = node.reason_at, node.reason.startswith(OUR_DRAIN)
            if at is None or ours or not is_drained(node.state) or at < self._wall() - FORGOTTEN_S:
                continue
            if (key := f"drain:{node.name}:{at:.0f}") not in self._events:
                what = f"{node.name} was drained{f' by {node.reason_user}' if node.reason_user else ''}: {node.reason}"
                if drain_meaning(node.reason) is DrainMeaning.NODE:
                    self._add(key, node.name, NodeEventKind.DRAINED, at, what)

    def note_report(self, report: Report) -> None:
        """What a node reports: GPUs with a history, and links that fell while a job ran there."""
        node, now = report.node, self._wall()
        for uuid in (gpu.uuid for gpu in report.gpus):
            if self._gpu_nodes.get(uuid) != node and uuid in self._places:
                self._gpu_nodes[uuid] = node
                self._nodes = self._suspects = None
        # A link of a node that is set up or shut down falls, too.
        for seen in report.node_events if report.processes else ():
            if seen.name in ADAPTER and not seen.backlog:
                at, device = now - seen.age_s, seen.device or ""
                key = f"link:{node}:{device}:{at // SAME_S:.0f}"  # that it flaps is one event
                place = f"{LINK_PLACE}{device}"[:120] if device else ""
                self._add(key, node, NodeEventKind.LINK_DOWN, at, f"{node}: {seen.line or seen.name}", place=place)

    def _add(self, key: str, node: str, kind: NodeEventKind, at: float, what: str, **about: Any) -> None:
        if key not in self._events:
            self.record(NodeEvent(key=key, node=node, kind=kind, at=at, what=what, **about))

    def events(self) -> Iterable[NodeEvent]:
        """All that still weighs something, in no order."""
        return self._events.values()

    def suspicions(self) -> list[NodeSuspicion]:
        """Of every node that anything is to be said against now, the worst first."""
        return suspicions(self._known(), self._wall())

    def suspects(self) -> tuple[NodeSuspicion, ...]:
        """The same as of the last minute, for detectors: what fades does so over weeks."""
        now = self._wall()
        if self._suspects is None or not 0 <= now - self._suspects[0] < FADES_S:
            self._suspects = now, tuple(self.suspicions())
        return self._suspects[1]

    def history(self, node: str) -> list[Counted]:
        """All that is kept of a node and of the GPUs that it has now, oldest first. Raises JournalError."""
        gpus = [uuid for uuid, where in self._gpu_nodes.items() if where == node]
        before = [old for old, new in self._renamed.items() if new == node]
        old = by_node(self._journal.node_events.of(node=[node, *before], place=gpus), self._gpu_nodes, self._renamed)
        found = {each.event.key: each for events in old.values() for each in events}
        found |= {each.event.key: each for each in self._known().get(node, ())}
        return sorted(found.values(), key=lambda each: each.event.at)

    def _known(self) -> dict[str, list[Counted]]:
        if self._nodes is None:
            self._nodes = by_node(self._events.values(), self._gpu_nodes, self._renamed)
        return self._nodes

    def _job_of_incident(self, incident: Incident) -> SlurmJob | None:
        return next((job for each in incident.job_ids if (job := self._job_of(each)) is not None), None)

    def _forget(self) -> None:
        """Once a day: what weighs nothing goes from memory, what is too old from the journal."""
        now = self._wall()
        if now - self._forgotten_at >= DAY_S:
            self._forgotten_at = now
            kept = [each for each in self._events.values() if each.at >= now - FORGOTTEN_S]
            self._events, self._of_incident, self._places = {}, {}, set()
            self._keep_all(kept)
            self._writer.write_or_queue(lambda: self._journal.node_events.prune(now - KEPT_S))


def _chain(job: SlurmJob | None) -> str:
    """Whose job it is, and its name."""
    return "" if job is None else f"{job.uid}/{job.name}"[:MAX_WHAT]
