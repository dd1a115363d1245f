"""A job that became slow, and its runs since then: what is remembered to find the node that makes it slow."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct


class SearchRun(Struct):
    """One run of the job: which nodes it used and how fast it was."""

    nodes: tuple[str, ...] = ()
    level: float  # Logarithm of the seconds of a step.
    error: float  # Standard error of `level`.
    at: float  # When the newest of these steps was made.
    batches: int = 0  # Batches of steps that were measured.
    restarts: int = 0
    step_id: str | None = None  # With `restarts`: another one in the same allocation is another run.


class SlowSearch(Struct):
    """Of one job. Dates are the controller's."""

    job_id: str
    chain: str  # Whose job it is, and its name: see NodeEvent.
    incident_id: str  # The `slow_job` with which it began.
    opened_at: float
    step: int  # Since which it is slow.
    alike: tuple[float | None, bool]
    """Samples a step, and whether the log itself says how long one takes: only such runs are compared."""
    fast: float
    error: float  # As `level` and `error` of a run, before that step.
    first: SearchRun  # The run in which it became slow; all others are compared with it.
    runs: tuple[SearchRun, ...] = ()  # On other nodes, oldest first.
    faulty: tuple[str, ...] = ()  # Nodes that failed a test since.
    named: tuple[tuple[str, bool], ...] = ()
    """The node that the history of nodes has by this search, and whether in full."""
