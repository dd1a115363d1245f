"""What is written, and to which part of the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slurm_watchdog.journal.error import JournalError
    from slurm_watchdog.journal.journal import NodeEntry
    from slurm_watchdog.model.actions import ActionRun, Decision
    from slurm_watchdog.model.incidents import Incident


class Writer(Protocol):
    """Writes to a journal that may fail: see slurm_watchdog.journal.writer."""

    def add_note(self, incident: Incident, text: str) -> None: ...

    def together(self, work: Callable[[], object]) -> None: ...

    def write(self, work: Callable[[], object]) -> bool: ...

    def write_or_queue(self, work: Callable[[], object]) -> None: ...

    def failed(self, error: JournalError) -> None: ...


class DecisionJournal(Protocol):
    """What decisions are based on, and where they are written before anything is done. Every method may raise
    JournalError."""

    def decisions_since(self, at: float) -> list[Decision]: ...

    def decisions_about(self, incident_ids: Iterable[str]) -> dict[str, list[Decision]]: ...

    def actions(self, incident_id: str) -> list[ActionRun]: ...

    def timeline(self, incident_id: str) -> list[tuple[float, str]]: ...

    def add_decision(self, decision: Decision) -> None: ...

    def save_incident(self, incident: Incident) -> None: ...

    def together(self) -> AbstractContextManager[None]: ...

    def paused(self) -> tuple[str, str, float] | None: ...

    def node_entries(self, what: str, job_id: str | None = None) -> Sequence[NodeEntry]:
        """What we did to nodes and have not taken back."""
