"""What the controller answers about lost time, as a frozen value."""

from __future__ import annotations

from slurm_watchdog.analysis import lost_time
from slurm_watchdog.model.run_record import RunRecord


class Report(lost_time.Report, frozen=True, kw_only=True):
    """The report, and what only the answer has."""

    known_jobs: int
    """`jobs` has those that lost most."""
    runs: tuple[RunRecord, ...] = ()
    """Of a report about one job alone."""
