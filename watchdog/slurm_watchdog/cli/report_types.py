"""What the controller answers about lost time, as frozen values. Hours are node-hours, but for `queued_h`."""

from __future__ import annotations

from slurm_watchdog.analysis.saved_time import Savings
from slurm_watchdog.cli.api_types import Answer


class JobTime(Answer, frozen=True, kw_only=True):
    job_id: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    nodes: int = 1
    runs: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    allocated_h: float = 0.0
    measured_h: float = 0.0
    effective_h: float = 0.0
    share: float | None = None
    lost_h: tuple[tuple[str, float], ...] = ()
    to_be_noticed_h: tuple[tuple[str, float], ...] = ()
    """What of `lost_h` came before the incident was reported, by its kind."""
    queued_h: float = 0.0
    failures: int = 0


class JobRun(Answer, frozen=True, kw_only=True):
    """One run of one job; times are dates."""

    restarts: int = 0
    began_at: float = 0.0
    ended_at: float | None = None
    state: str = ""
    nodes: int = 1
    first_step: int | None = None
    last_step: int | None = None
    first_rise_at: float | None = None
    last_rise_at: float | None = None
    step_s: float | None = None


class Report(Answer, frozen=True, kw_only=True):
    since: float = 0.0
    until: float = 0.0
    jobs: tuple[JobTime, ...] = ()
    known_jobs: int = 0
    allocated_h: float = 0.0
    measured_h: float = 0.0
    effective_h: float = 0.0
    share: float | None = None
    lost_h: tuple[tuple[str, float], ...] = ()
    to_be_noticed_h: tuple[tuple[str, float], ...] = ()
    failures: int = 0
    node_hours_between_failures: float | None = None
    incidents: tuple[tuple[str, int], ...] = ()
    nodes: tuple[tuple[str, int], ...] = ()
    savings: Savings = Savings()
    runs: tuple[JobRun, ...] = ()
    """Of a report about one job alone."""
