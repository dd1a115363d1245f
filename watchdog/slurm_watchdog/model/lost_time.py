"""What a report counts: the time of jobs, what was lost of it and what restarts saved."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.run_record import RunRecord


class Savings(Struct):
    """Of the incidents that an action of ours ended."""

    saved_h: float = 0.0  # Node-hours, of those that could be compared.
    compared: int = 0
    unknown: int = 0  # Those without a comparable one before.
    usual_wait_s: float | None = None  # The median wait that they were compared with; None: there is none.
    would_save_h: float = 0.0  # Node-hours, of runs whose restart was decided and only observed.
    observed: int = 0  # Those runs.
    recovered: int = 0  # Runs of which the same was decided, and that trained again by themselves.


class Hours(Struct):
    """Node-hours of one job, or of all together."""

    allocated_h: float
    measured_h: float
    effective_h: float
    lost_h: tuple[tuple[str, float], ...]  # (cause, node-hours), the largest first.
    failures: int
    """Runs that ended by themselves with an error, or by an action for an incident; not those that ended for
    maintenance, at a time limit, or since a person asked."""
    share: float | None  # Effective share of what was measured; None: nothing was.


class JobTime(Hours):
    """Of one job."""

    job_id: str
    name: str
    user: str
    account: str
    partition: str
    nodes: int
    runs: int
    began_at: float
    ended_at: float
    to_be_noticed_h: tuple[tuple[str, float], ...] = ()
    """What of `lost_h` came before the incident was reported, by its kind."""
    queued_h: float  # Hours, not node-hours, in the queue between its runs.


class Report(Hours):
    """Of all jobs together."""

    since: float
    until: float
    jobs: tuple[JobTime, ...]  # Those that lost most first.
    known_jobs: int  # An answer has the first of `jobs` only.
    runs: tuple[RunRecord, ...] = ()  # In an answer about one job alone.
    to_be_noticed_h: tuple[tuple[str, float], ...]  # As of a job.
    node_hours_between_failures: float | None
    incidents: tuple[tuple[str, int], ...]  # (kind, how many), the most first.
    nodes: tuple[tuple[str, int], ...]
    """(node, incidents that name it), the most first; maintenance of a node is no incident of its own."""
    savings: Savings
