"""What the parts of the controller need of one another: a narrow Protocol for each need.

Nobody holds the whole controller. `Decider`, `Actions`, `Collector`, the local socket and the page are given what they use, and it may
come from elsewhere: `replay` drives the same Decider with a journal in memory and an executor that only writes down.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Reversible, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slurm_watchdog.base import clock

if TYPE_CHECKING:
    from slurm_watchdog.base.capped import LeftOut
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.controller.actions.tools import Outcome
    from slurm_watchdog.controller.health.cluster import Health
    from slurm_watchdog.controller.health.metrics import ControllerMetrics
    from slurm_watchdog.controller.ingest.command_queue import CommandDesk
    from slurm_watchdog.controller.state.agents import Agents
    from slurm_watchdog.controller.state.cluster import ClusterState
    from slurm_watchdog.controller.state.evidence_collection import Collected
    from slurm_watchdog.controller.state.nodes import Nodes
    from slurm_watchdog.journal.error import JournalError
    from slurm_watchdog.journal.journal import Journal
    from slurm_watchdog.model.actions import ActionRun, Decision
    from slurm_watchdog.model.cluster_view import ClusterView, FilesystemView, JobView
    from slurm_watchdog.model.incidents import Incident, ProbeWanted
    from slurm_watchdog.model.protocol import Command, CommandResult
    from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
    from slurm_watchdog.notify.notification import Delivery
    from slurm_watchdog.slurm.client import SlurmClient
    from slurm_watchdog.trace.records import Own

# ------------------------------------------------------------------------------------ what was judged


class Incidents(Collection["Incident"], Reversible["Incident"], Protocol):
    """The open incidents, to be read: their owner alone edits them."""

    def get(self, incident_id: str) -> Incident | None:
        """The open incident with this id."""


class Judgement(Protocol):
    """What the newest look at everything gave."""

    @property
    def incidents(self) -> Incidents: ...

    @property
    def limits_s(self) -> Mapping[str, float]:
        """Job -> the longest time without a step that is normal for it now."""

    @property
    def slurm_patience_s(self) -> float:
        """An older listing says nothing about now."""


class JudgedView(Judgement, Protocol):
    """The same, with what it was about."""

    @property
    def view(self) -> ClusterView: ...


# ------------------------------------------------------------------------------------ what is written


class Writer(Protocol):
    """Writes to a journal that may fail: see slurm_watchdog.journal.writer."""

    def note(self, incident: Incident, text: str) -> None: ...

    def write(self, work: Callable[[], object]) -> bool: ...

    def tell(self, work: Callable[[], object]) -> None: ...

    def failed(self, error: JournalError) -> None: ...


class EvidenceWriter(Protocol):
    """As much of it as evidence needs."""

    def note(self, incident: Incident, text: str) -> None: ...

    def write(self, work: Callable[[], object]) -> bool: ...


class DecisionJournal(Protocol):
    """What decisions are based on, and where they are written before anything is done. Every method may raise JournalError."""

    def decisions_since(self, at: float) -> list[Decision]: ...

    def decisions_about(self, incident_ids: Iterable[str]) -> dict[str, list[Decision]]: ...

    def actions(self, incident_id: str) -> list[ActionRun]: ...

    def add_decision(self, decision: Decision) -> None: ...

    def save_incident(self, incident: Incident) -> None: ...

    def together(self) -> AbstractContextManager[None]: ...

    def paused(self) -> tuple[str, str, float] | None: ...

    def node_entries(self, what: str) -> Sequence[object]:
        """What we did to nodes and have not taken back; it is counted."""


class EvidenceJournal(Protocol):
    """Where evidence is kept. Every method may raise JournalError."""

    def add_packed_evidence(
        self, incident_id: str, at: float, kind: str, packed: str, collection: str | None = None
    ) -> None: ...

    def share_evidence(self, incident_id: str, collection: str, stored_with: str) -> None: ...

    def forget_evidence(self, before: float) -> int: ...

    def note(self, incident_id: str, at: float, text: str) -> None: ...


# ------------------------------------------------------------------------------------ what is known of the cluster


class Cluster(Protocol):
    """Jobs and nodes, as decisions need them."""

    @property
    def jobs(self) -> Mapping[str, SlurmJob]: ...

    @property
    def nodes(self) -> Nodes: ...

    @property
    def slurm_nodes(self) -> tuple[SlurmNode, ...]: ...

    def job_view(self, job_id: str, now: float) -> JobView | None: ...

    def known_nodes(self) -> Collection[str]: ...

    def reporting_nodes(self, now: float) -> Collection[str]: ...

    def owner_of(self, job_id: str) -> int | None: ...

    def variables_of(self, job: SlurmJob) -> dict[str, str]: ...


class ObservedCluster(Protocol):
    """Jobs, agents and filesystems, as collections of evidence need them."""

    @property
    def jobs(self) -> Mapping[str, SlurmJob]: ...

    @property
    def agents(self) -> Agents: ...

    @property
    def left_out(self) -> LeftOut: ...

    def job_view(self, job_id: str, now: float) -> JobView | None: ...

    def filesystem_views(self, now: float) -> tuple[FilesystemView, ...]: ...


# ------------------------------------------------------------------------------------ who does it, and who tells


class Executor(Protocol):
    """Carries out what was allowed; `Actions` really does, a replay writes it down."""

    def drive(self, run: ActionRun) -> None: ...

    def is_busy(self, job_id: str) -> bool:
        """Whether an action on the job is under way."""

    def sweep(self, now: float) -> None:
        """Takes back what lasted long enough."""


@dataclass(frozen=True)
class RestartRequest:
    """What an operator asks for."""

    job: SlurmJob
    exclude: tuple[str, ...]
    reason: str
    asked_by: str
    at_once: bool
    """Without a kill switch."""


class DecisionNews(Protocol):
    """Hears what was decided, after it is written and before anything is done for it."""

    def decided(self, incident: Incident, decision: Decision) -> None: ...

    def requested(self, incident: Incident, request: RestartRequest) -> None:
        """A person asks for a restart: the request is an incident."""

    def journal_failed(self, error: JournalError) -> None: ...


class IncidentEditor(Protocol):
    """Opens and closes incidents that no detector opens and closes; their owner does it, and reports it."""

    def add_incident(self, incident: Incident) -> None:
        """Opens the incident of a request that is carried out."""

    def close_incident(self, incident: Incident, why: str) -> None:
        """Its action has ended, or was refused."""


class EndNews(Protocol):
    """Hears how actions ended."""

    def ended(self, incident: Incident, run: ActionRun) -> None: ...


class DiagnosisNews(Protocol):
    """Hears what the evidence of an incident tells."""

    def diagnosed(self, incident: Incident, said: list[str]) -> None: ...


class Questions(Protocol):
    """Asks a node's agent."""

    async def ask(
        self, node: str, command: Command, deadline_s: float, uid: int | None = None
    ) -> CommandResult: ...


class Probing(Protocol):
    """Asks nodes whether they reach a filesystem."""

    def probe(self, wanted: ProbeWanted, now: float) -> None: ...

    async def answered(self, mounts: Iterable[str], limit_s: float) -> None: ...


# ------------------------------------------------------------------------------------ what each part is given


@dataclass(frozen=True)
class DecisionPorts:
    """Of the Decider."""

    journal: DecisionJournal
    cluster: Cluster
    judgement: Judgement
    executor: Executor
    news: DecisionNews
    incidents: IncidentEditor
    blind: Callable[[float], str | None]
    """Why nothing may be done at this moment (monotonic), a sentence; None if all is seen well."""
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    """Of a decision."""
    new_incident_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    monotonic: Callable[[], float] = clock.monotonic
    wall: Callable[[], float] = clock.wall


@dataclass(frozen=True)
class ActionPorts:
    """Of the executor that really acts."""

    journal: Journal
    state: ClusterState
    slurm: SlurmClient
    desk: CommandDesk
    judgement: Judgement
    collect: Callable[[Decision], Awaitable[Outcome]]
    """Waits for the evidence of the decision's job, for a bounded time."""
    writer: Writer
    news: EndNews
    incidents: IncidentEditor
    metrics: ControllerMetrics
    blind: Callable[[float], str | None]
    record: Callable[[Own], None]
    """Takes what a recording has to say of actions."""
    on_failure: Callable[[Decision], None]
    """Hears of the decision whose action has ended without success."""


@dataclass(frozen=True)
class EvidencePorts:
    """Of those who collect evidence."""

    journal: EvidenceJournal
    writer: EvidenceWriter
    cluster: ObservedCluster
    judgement: JudgedView
    agents: Questions
    probes: Probing
    news: DiagnosisNews


# ------------------------------------------------------------------------------------ what commands and the page are answered from


class Collections(Protocol):
    """Evidence that a person asks for."""

    def collect(self, job: SlurmJob, now: float, incident_id: str | None = None) -> Collected: ...

    def known(self, collection_id: str) -> Collected | None: ...


class ActionsUnderWay(Protocol):
    """What is being done, for people."""

    def waiting(self, decision_id: str) -> tuple[str, float | None] | None: ...

    def abandon(self, job_id: str, by: str) -> str | None: ...

    def stuck(self) -> dict[str, str]: ...


class Requests(Protocol):
    """Takes an operator's restart."""

    def ask_restart(
        self, job: SlurmJob, exclude: tuple[str, ...], reason: str, asked_by: str, *, at_once: bool = False
    ) -> tuple[Incident, Decision]: ...


class ListedCluster(Protocol):
    """Jobs and nodes, as commands need them."""

    @property
    def jobs(self) -> Mapping[str, SlurmJob]: ...

    @property
    def node_addresses(self) -> Collection[str]: ...

    @property
    def left_out(self) -> LeftOut: ...

    def job_view(self, job_id: str, now: float) -> JobView | None: ...

    def apply_job(self, job: SlurmJob, now: float, wall: float | None = None) -> None: ...


class JobReader(Protocol):
    """Reads one job from Slurm. Raises SlurmUnavailable, SlurmRefused."""

    async def read_job(self, job_id: str) -> SlurmJob | None: ...


class Deliveries(Protocol):
    """How messages fare."""

    def deliveries(self) -> tuple[Delivery, ...]: ...


class Overseen(Protocol):
    """What the page shows."""

    @property
    def config(self) -> Config: ...

    @property
    def journal(self) -> Journal: ...

    @property
    def judge(self) -> JudgedView: ...

    @property
    def last_tick(self) -> float | None:
        """When a tick was last completed, monotonic."""

    def health(self) -> Health: ...


class Commanded(Overseen, Protocol):
    """What the commands of the local socket are answered from."""

    @property
    def started_at(self) -> float: ...

    @property
    def warm_from(self) -> float: ...

    @property
    def journal_error(self) -> str | None: ...

    @property
    def slurm_error(self) -> str | None: ...

    @property
    def state(self) -> ListedCluster: ...

    @property
    def slurm(self) -> JobReader: ...

    @property
    def notifier(self) -> Deliveries: ...

    @property
    def collector(self) -> Collections: ...

    @property
    def actions(self) -> ActionsUnderWay: ...

    @property
    def decider(self) -> Requests: ...

    def slurm_notes(self) -> list[str]: ...
