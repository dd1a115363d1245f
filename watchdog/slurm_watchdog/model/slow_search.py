"""The search for the nodes that make a job slow: what is remembered of the job's runs."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Truth


class SearchRun(Struct, frozen=True, kw_only=True):
    """One run of the job: which nodes it used and how fast it was."""

    nodes: tuple[str, ...]
    level: float
    """Logarithm of the seconds of a step."""
    error: float
    """Standard error of `level`."""
    at: float
    """Seconds; when it was measured."""
    batches: int = 0
    """Batches of steps that were measured."""
    restarts: int = 0
    """Slurm's count of the job's restarts."""
    step_id: str | None = None
    """The Slurm step of its ranks: another one in the same allocation is another run."""


class SlowSearch(Struct, frozen=True, kw_only=True):
    """A job that became slow, and its runs since then."""

    suspects: tuple[str, ...]
    """Nodes that it used when it became slow."""
    fast: float
    """Logarithm of the seconds of a step before that."""
    slow: float
    error: float
    """Standard error of `fast`; of both where `slow_error` is not known."""
    at: float
    slow_error: float | None = None
    """Of `slow`: what makes a job slow may make its steps uneven, too."""
    runs: tuple[SearchRun, ...] = ()
    """On other nodes, oldest first."""
    faulty: tuple[str, ...] = ()
    """Nodes that failed a test while the job ran without them."""


class SearchTest(Struct, frozen=True, kw_only=True):
    """What a test said of one of the nodes, while the job ran without it."""

    node: str
    at: float
    truth: Truth
    what: str
    """What is wrong with it, why it was not judged, or its figures."""


class SearchState(StrEnum):
    """How far a search has come."""

    SEARCHING = "searching"
    FOUND = "found"
    ACQUITTED = "acquitted"
    """It is none of the nodes."""


class JobSearch(Struct, frozen=True, kw_only=True):
    """The search that goes with one job. Dates are the controller's."""

    job_id: str
    chain: str
    """Whose job it is, and its name: see NodeEvent."""
    incident_id: str
    """The `slow_job` with which it began."""
    opened_at: float
    updated_at: float
    restarts: int
    """Of the run that became slow, with `step_id`; all others are compared with it."""
    step_id: str | None
    step: int
    """Since which it is slow."""
    batch: float | None
    """Samples a step: runs with another batch size are not compared."""
    logged: bool
    """Whether the log itself says how long a step takes."""
    search: SlowSearch
    state: SearchState = SearchState.SEARCHING
    named: tuple[str, ...] = ()
    """Nodes that the ledger knows of by this search."""
    confirmed: tuple[str, ...] = ()
    """Of these, those that are held against the node in full."""
    tests: tuple[SearchTest, ...] = ()
    """Of nodes that were idle, oldest first."""
