"""What commands and the page are answered from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slurm_watchdog.base.capped import Shortage
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.controller.actions.manager import Actions
    from slurm_watchdog.controller.evidence.collector import Collector
    from slurm_watchdog.controller.health.cluster import Health
    from slurm_watchdog.controller.incidents.judge import Judge
    from slurm_watchdog.controller.node_history.ledger import NodeLedger
    from slurm_watchdog.controller.state.cluster import ClusterState
    from slurm_watchdog.journal.journal import Journal
    from slurm_watchdog.model.actions import Decision, Wish
    from slurm_watchdog.model.incidents import Incident
    from slurm_watchdog.model.silence import Silence
    from slurm_watchdog.model.slurm import SlurmJob
    from slurm_watchdog.notify.dispatcher import Notifier
    from slurm_watchdog.slurm.client import SlurmClient


class RestartRequests(Protocol):
    """Takes an operator's restart."""

    def why_left_alone(self, job: SlurmJob) -> str: ...

    def ask_restart(
        self, job: SlurmJob, exclude: tuple[str, ...], reason: str, asked_by: str, *, at_once: bool = False,
        wish: Wish = ..., within_s: float | None = None,
    ) -> tuple[Incident, Decision]: ...  # fmt: skip


class Silencing(Protocol):
    """What people are not notified of: see slurm_watchdog.controller.silences."""

    def listed(self) -> tuple[Silence, ...]: ...

    def add(self, silence: Silence) -> None: ...

    def end(self, silence: Silence, why: str) -> None: ...

    def words_of(self, incident: Incident) -> str: ...


class CommandSources(Protocol):
    """See slurm_watchdog.controller.controller."""

    config: Config
    journal: Journal
    judge: Judge
    state: ClusterState
    slurm: SlurmClient
    ledger: NodeLedger
    notifier: Notifier
    collector: Collector
    actions: Actions
    last_tick: float | None
    """When a tick was last completed, monotonic."""
    started_at: float
    warm_up_began: float
    slurm_error: str | None

    @property
    def silences(self) -> Silencing: ...

    @property
    def decider(self) -> RestartRequests: ...

    @property
    def journal_error(self) -> str | None: ...

    def health(self) -> Health: ...

    def left_out(self, now: float) -> tuple[Shortage, ...]: ...

    def slurm_notes(self) -> list[str]: ...
