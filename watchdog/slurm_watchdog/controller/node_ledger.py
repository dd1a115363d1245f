"""What is remembered of nodes: writes down what happens to them, and knows what that makes of each.

One event loop owns it. The journal has everything; in memory is what still weighs something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.text import one_line
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.knowledge.drain_reasons import DrainMeaning, drain_meaning
from slurm_watchdog.knowledge.kernel_causes import ADAPTER
from slurm_watchdog.ledger.counted import DAY_S, FORGOTTEN_S, SAME_S, Counted
from slurm_watchdog.ledger.from_incident import MAX_WHAT, blamed, events_of
from slurm_watchdog.ledger.suspicion import Suspicion, by_node, suspicions
from slurm_watchdog.ledger.words import event_words, repeated
from slurm_watchdog.model.incidents import Finding, Incident
from slurm_watchdog.model.node_events import LINK_PLACE, NodeEvent, NodeEventKind, SuspectNode
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import is_drained

FADES_S, MAX_REASONS = 60.0, 8
KEPT_S: Final = 2 * 365 * DAY_S
"""Older events are dropped from the journal: as long as many guarantees, and nothing is left of their weight."""


class NodeLedger:
    """See the module."""

    def __init__(
        self,
        journal: Journal,
        writer: JournalWriter,
        job_of: Callable[[str], SlurmJob | None],
        *,
        wall: Callable[[], float],
        our_reason: str,
        renamed: Mapping[str, str],
    ):
        """`our_reason` begins the reasons of our own drains. `renamed`: a node's name before -> its name now. Raises
        JournalError."""
        self._journal, self._writer, self._job_of, self._wall = journal, writer, job_of, wall
        self._our_reason, self._renamed = our_reason, renamed
        self._events = {each.key: each for each in journal.node_events.since(wall() - FORGOTTEN_S)}
        self._of_incident: dict[str, set[str]] = {}
        """Incident -> the keys of its events, withdrawn ones too."""
        for event in self._events.values():
            if event.incident_id:
                self._of_incident.setdefault(event.incident_id, set()).add(event.key)
        self._places = {event.place for event in self._events.values() if event.place}
        """Parts of nodes that have a history."""
        self._gpu_nodes: dict[str, str] = {}
        """Of GPUs that have a history: where each was seen last."""
        self._nodes: dict[str, list[Counted]] | None = None
        self._suspects: tuple[float, tuple[SuspectNode, ...]] | None = None
        """When they were computed last, and what came of it."""
        self._forgotten_at = 0.0

    # ------------------------------------------------------------------------------------ what happens

    def record(self, event: NodeEvent) -> None:
        """Writes an event down. The same key twice is one event, as it was given last."""
        event = replace(event, what=one_line(event.what, MAX_WHAT))
        if self._events.get(event.key) == event:
            return
        self._events[event.key] = event
        if event.place:
            self._places.add(event.place)
        if event.incident_id:
            self._of_incident.setdefault(event.incident_id, set()).add(event.key)
        self._nodes = self._suspects = None
        self._writer.write_or_queue(lambda: self._journal.node_events.save(event))
        self._forget()

    def note_incident(self, incident: Incident) -> None:
        """An incident is, or has become, something else: the events that it made follow it. What another
        incident has once explained stays withdrawn."""
        now = self._wall()
        chain, compared = self._job_facts(incident)
        events = {each.key: each for each in events_of(incident, chain, compared=compared)}
        for key in self._of_incident.get(incident.id, set()) - events.keys():
            known = self._events.get(key)
            if known is None or known.withdrawn_why or known.kind != incident.kind:
                continue
            why = (
                f"incident {incident.inhibited_by} explains it"
                if incident.inhibited_by is not None
                else "its incident names somebody else now"
            )
            self.record(replace(known, withdrawn_at=now, withdrawn_why=why))
        for key, event in events.items():
            known = self._events.get(key)
            explained = known is not None and known.withdrawn_why.startswith("incident ")
            if not explained:
                self.record(event if known is None else replace(event, chain=known.chain or event.chain))

    def note_restart(self, incident: Incident, left_out: Iterable[str]) -> None:
        """A job of the incident runs well again, and was started without these nodes."""
        job = next((job for each in incident.job_ids if (job := self._job_of(each)) is not None), None)
        helped = [(node, place) for node, place in blamed(incident) if node in set(left_out)]
        for node, place in helped if job is not None else ():
            if job is None or node in job.nodes:
                continue
            what = f"job {job.job_id} made new steps once it ran without {node}"
            event = NodeEvent(
                key=f"helped:{incident.id}:{node}", node=node, kind=NodeEventKind.RESTART_HELPED, at=self._wall(),
                what=what, place=place, job_id=job.job_id, chain=_chain(job), incident_id=incident.id,
            )  # fmt: skip
            self.record(event)

    def note_drains(self, nodes: Iterable[SlurmNode]) -> None:
        """Slurm's newest listing: who was drained by somebody else, and for a fault of the node."""
        for node in nodes:
            if node.reason_at is None or not node.reason or not is_drained(node.state):
                continue
            key = f"drain:{node.name}:{node.reason_at:.0f}"
            ours = node.reason.startswith(self._our_reason)
            if ours or key in self._events or drain_meaning(node.reason) is not DrainMeaning.NODE:
                continue
            if node.reason_at < self._wall() - FORGOTTEN_S:
                continue
            by = f" by {node.reason_user}" if node.reason_user else ""
            what = f"{node.name} was drained{by}: {node.reason}"
            self.record(NodeEvent(key=key, node=node.name, kind=NodeEventKind.DRAINED, at=node.reason_at, what=what))

    def note_report(self, report: Report) -> None:
        """What a node reports: GPUs that have moved, and links that fell while a job ran there."""
        self._note_gpus(report.node, (gpu.uuid for gpu in report.gpus))
        if not report.processes:
            return  # a link of a node that is set up or shut down falls, too
        for seen in report.node_events:
            if seen.name not in ADAPTER or seen.backlog:
                continue
            at, device = self._wall() - seen.age_s, seen.device or ""
            key = f"link:{report.node}:{device}:{at // SAME_S:.0f}"  # that it flaps is one event
            if key not in self._events:
                what = f"{report.node}: {seen.line or seen.name}"
                place = f"{LINK_PLACE}{device}"[:120] if device else ""
                self.record(
                    NodeEvent(key=key, node=report.node, kind=NodeEventKind.LINK_DOWN, at=at, what=what, place=place)
                )

    def _note_gpus(self, node: str, uuids: Iterable[str]) -> None:
        """The GPUs that a node reports: one with a history that was in another node has moved."""
        for uuid in uuids:
            before = self._gpu_nodes.get(uuid)
            if before == node or (before is None and uuid not in self._places):
                continue
            before = before or self._last_node_of(uuid)
            self._gpu_nodes[uuid] = node
            if before is not None and before != node:
                self._tell_moved(uuid, before, node)

    def _tell_moved(self, uuid: str, before: str, node: str) -> None:
        now = self._wall()
        for told, what in (
            (node, f"{uuid}, which has a history, came from {before}: it counts here from now on"),
            (before, f"{uuid} is in {node} now: what it did counts there from now on"),
        ):
            key = f"moved:{uuid}:{before}:{node}:{told}"
            if key not in self._events:
                self.record(NodeEvent(key=key, node=told, kind=NodeEventKind.GPU_MOVED, at=now, what=what))
        self._nodes = self._suspects = None

    # ------------------------------------------------------------------------------------ what is known

    def facts(self, finding: Finding, incident_id: str | None) -> tuple[str, ...]:
        """What the past of the nodes that a finding blames adds to it: a sentence for each that is there for the
        third time or more. `incident_id`: the open incident that the finding belongs to."""
        known, now = self._known(), self._wall()
        said = (
            repeated(node, known.get(node, ()), now, incident_id, place) for node, place in blamed(finding) if known
        )
        return tuple(each for each in said if each is not None)

    def events(self) -> Iterable[NodeEvent]:
        """All that still weighs something, in no order."""
        return self._events.values()

    def suspicions(self) -> list[Suspicion]:
        """Of every node that anything is to be said against now, the worst first."""
        return suspicions(self._known(), self._wall())

    def suspects(self) -> tuple[SuspectNode, ...]:
        """The same for detectors, as of the last minute: what fades does so over weeks."""
        now = self._wall()
        if self._suspects is None or not 0 <= now - self._suspects[0] < FADES_S:
            found = tuple(
                SuspectNode(
                    node=each.node, score=each.score, place=each.place, recent=each.recent,
                    reasons=tuple(event_words(of, now) for of in each.counted[:MAX_REASONS]),
                )
                for each in self.suspicions()
            )  # fmt: skip
            self._suspects = (now, found)
        return self._suspects[1]

    def history(self, node: str) -> list[Counted]:
        """All that is kept of a node and of the GPUs that it has now, oldest first. Raises JournalError."""
        gpus = [uuid for uuid, where in self._gpu_nodes.items() if where == node]
        before = [old for old, new in self._renamed.items() if new == node]
        events = {each.key: each for each in self._journal.node_events.of_node((node, *before), gpus)}
        today = {each.event.key: each for each in self._known().get(node, ())}
        old = by_node(events.values(), self._gpu_nodes, self._renamed)
        found = {each.event.key: each for events_there in old.values() for each in events_there}
        return sorted((found | today).values(), key=lambda each: each.event.at)

    def _known(self) -> dict[str, list[Counted]]:
        if self._nodes is None:
            self._nodes = by_node(self._events.values(), self._gpu_nodes, self._renamed)
        return self._nodes

    def _last_node_of(self, uuid: str) -> str | None:
        there = [each for each in self._events.values() if each.place == uuid]
        return max(there, key=lambda each: each.at).node if there else None

    def _job_facts(self, incident: Incident) -> tuple[str, bool]:
        """Whose job it is about and its name, and whether that job ran on several nodes."""
        job = next((job for job_id in incident.job_ids if (job := self._job_of(job_id)) is not None), None)
        return ("", False) if job is None else (_chain(job), len(job.nodes) > 1)

    def _forget(self) -> None:
        """Once a day: what weighs nothing goes from memory, what is too old from the journal."""
        now = self._wall()
        if now - self._forgotten_at < DAY_S:
            return
        self._forgotten_at = now
        for key in [key for key, each in self._events.items() if each.at < now - FORGOTTEN_S]:
            self._of_incident.get(self._events.pop(key).incident_id, set()).discard(key)
        self._of_incident = {incident: keys for incident, keys in self._of_incident.items() if keys}
        self._writer.write_or_queue(lambda: self._journal.node_events.forget(now - KEPT_S))


def _chain(job: SlurmJob) -> str:
    return f"{job.uid}/{job.name}"[:MAX_WHAT]


def ledger_of(config: Config, journal: Journal, writer: JournalWriter, state: ClusterState) -> NodeLedger:
    """The ledger of a controller. Raises JournalError."""
    return NodeLedger(
        journal,
        writer,
        lambda job_id: state.jobs.get(job_id),  # noqa: PLW0108 - each listing replaces the dictionary
        wall=clock.wall,
        our_reason=config.policy.drain_reason,
        renamed=config.policy.renamed_nodes,
    )
