"""What commands and the page are answered from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from slurm_watchdog.controller.ports.judged import JudgedView

if TYPE_CHECKING:
    from slurm_watchdog.base.capped import Shortage
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.controller.health.cluster import Health
    from slurm_watchdog.controller.node_history.suspicion import Counted
    from slurm_watchdog.controller.state.cluster import ClusterState
    from slurm_watchdog.controller.state.evidence_collection import Collected
    from slurm_watchdog.journal.journal import Journal
    from slurm_watchdog.model.actions import Decision, Wish
    from slurm_watchdog.model.documents import Delivery
    from slurm_watchdog.model.incidents import Incident
    from slurm_watchdog.model.node_documents import NodeSuspicion
    from slurm_watchdog.model.node_events import NodeEvent
    from slurm_watchdog.model.silence import Silence
    from slurm_watchdog.model.slurm import SlurmJob
    from slurm_watchdog.slurm.client import SlurmReads


class EvidenceCollections(Protocol):
    """Evidence that a person asks for."""

    def collect(self, job: SlurmJob, now: float, incident_id: str | None = None) -> Collected: ...

    def known(self, collection_id: str) -> Collected | None: ...


class ActionsUnderWay(Protocol):
    """What is being done, for people."""

    def waiting(self, decision_id: str) -> tuple[str, float | None] | None: ...

    def abandon(self, job_id: str, by: str) -> str | None: ...

    def stuck(self) -> dict[str, str]: ...


class RestartRequests(Protocol):
    """Takes an operator's restart."""

    def why_left_alone(self, job: SlurmJob) -> str: ...

    def ask_restart(
        self, job: SlurmJob, exclude: tuple[str, ...], reason: str, asked_by: str, *, at_once: bool = False,
        wish: Wish = ..., within_s: float | None = None,
    ) -> tuple[Incident, Decision]: ...  # fmt: skip


class NodePast(Protocol):
    """What is remembered of nodes: see slurm_watchdog.controller.node_history.ledger."""

    def record(self, event: NodeEvent) -> None: ...

    def events(self) -> Iterable[NodeEvent]: ...

    def suspicions(self) -> list[NodeSuspicion]: ...

    def history(self, node: str) -> list[Counted]: ...


class Silencing(Protocol):
    """What people are not notified of: see slurm_watchdog.controller.silences."""

    def listed(self) -> tuple[Silence, ...]: ...

    def add(self, silence: Silence) -> None: ...

    def end(self, silence: Silence, why: str) -> None: ...

    def words_of(self, incident: Incident) -> str: ...


class Deliveries(Protocol):
    """How messages fare."""

    def deliveries(self) -> tuple[Delivery, ...]: ...


class CommandSources(Protocol):
    """What the commands and the page are answered from."""

    @property
    def config(self) -> Config: ...

    @property
    def journal(self) -> Journal: ...

    @property
    def judge(self) -> JudgedView: ...

    @property
    def silences(self) -> Silencing: ...

    @property
    def last_tick(self) -> float | None:
        """When a tick was last completed, monotonic."""

    def health(self) -> Health: ...

    @property
    def started_at(self) -> float: ...

    @property
    def warm_up_began(self) -> float: ...

    @property
    def journal_error(self) -> str | None: ...

    @property
    def slurm_error(self) -> str | None: ...

    @property
    def state(self) -> ClusterState: ...

    def left_out(self, now: float) -> tuple[Shortage, ...]: ...

    @property
    def slurm(self) -> SlurmReads: ...

    @property
    def ledger(self) -> NodePast: ...

    @property
    def notifier(self) -> Deliveries: ...

    @property
    def collector(self) -> EvidenceCollections: ...

    @property
    def actions(self) -> ActionsUnderWay: ...

    @property
    def decider(self) -> RestartRequests: ...

    def slurm_notes(self) -> list[str]: ...
