"""What the Decider is given."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slurm_watchdog.base import clock
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.model.actions import Wish

if TYPE_CHECKING:
    from slurm_watchdog.controller.state.cluster import ClusterState
    from slurm_watchdog.journal.error import JournalError
    from slurm_watchdog.journal.journal import NodeEntry
    from slurm_watchdog.model.actions import ActionRun, Decision
    from slurm_watchdog.model.incidents import Incident
    from slurm_watchdog.model.slurm import SlurmJob


@dataclass(frozen=True)
class TickChunks:
    """How a tick with thousands of incidents is divided, so that requests and actions are served in between."""

    together_from: int = 20
    """Changes, or open incidents, from which on they are written together: one wait for the disk."""
    size: int = 250  # Changes, or decisions, before other work is served: about a tenth of a second.


CHUNKS = TickChunks()


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
    at_once: bool  # Without a kill switch.
    wish: Wish = Wish.RESTART
    within_s: float | None = None  # For so long a complete checkpoint is waited for; None: as usual.


class DecisionNews(Protocol):
    """Reports what was decided, after it is written and before anything is done for it; opens and closes the incidents
    that no detector opens and closes."""

    def decided(self, incident: Incident, decision: Decision) -> None: ...

    def requested(self, incident: Incident, request: RestartRequest) -> None:
        """A person asks for a restart: the request is an incident."""

    def journal_failed(self, error: JournalError) -> None: ...

    def add_incident(self, incident: Incident) -> None:
        """Opens the incident of a request that is carried out."""

    def close_incident(self, incident: Incident, why: str) -> None:
        """Its action has ended, or was refused."""


class DecisionJournal(Protocol):
    """What decisions are based on, and where they are written before anything is done. Every method may raise
    JournalError."""

    def decisions_since(self, at: float) -> list[Decision]: ...

    def decisions_about(self, incident_ids: Iterable[str]) -> dict[str, list[Decision]]: ...

    def actions(self, incident_id: str) -> list[ActionRun]: ...

    def add_decision(self, decision: Decision) -> None: ...

    def save_incident(self, incident: Incident) -> None: ...

    def together(self) -> AbstractContextManager[None]: ...

    def paused(self) -> tuple[str, str, float] | None: ...

    def node_entries(self, what: str, job_id: str | None = None) -> Sequence[NodeEntry]:
        """What we did to nodes and have not taken back."""


@dataclass(frozen=True)
class DecisionPorts:
    """Of the Decider."""

    journal: DecisionJournal
    cluster: ClusterState
    judgement: Judge
    executor: Executor
    news: DecisionNews
    blind: Callable[[float], str | None]
    """Why nothing may be done at this moment (monotonic), a sentence; None if all is seen well."""
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]  # Of a decision.
    new_incident_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    monotonic: Callable[[], float] = clock.monotonic
    wall: Callable[[], float] = clock.wall
