"""Who does what was decided, and who reports it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slurm_watchdog.model.actions import Wish

if TYPE_CHECKING:
    from slurm_watchdog.journal.error import JournalError
    from slurm_watchdog.model.actions import ActionRun, Decision
    from slurm_watchdog.model.incidents import Incident, MountProbeRequest
    from slurm_watchdog.model.slurm import SlurmJob


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
    wish: Wish = Wish.RESTART
    within_s: float | None = None
    """For so long a complete checkpoint is waited for; None: as usual."""


class DecisionNews(Protocol):
    """Reports what was decided, after it is written and before anything is done for it."""

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
    """Reports how actions ended."""

    def ended(self, incident: Incident, run: ActionRun) -> None: ...


class DiagnosisNews(Protocol):
    """Reports what the evidence of an incident shows."""

    def diagnosed(self, incident: Incident, said: list[str]) -> None: ...


class MountProbes(Protocol):
    """Asks nodes whether they reach a filesystem."""

    def probe(self, wanted: MountProbeRequest, now: float) -> None: ...

    async def answered(self, mounts: Iterable[str], limit_s: float) -> None: ...
