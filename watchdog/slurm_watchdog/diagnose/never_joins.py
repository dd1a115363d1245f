"""A run that does not start because ranks are stuck before they join the others. Pure."""

from __future__ import annotations

from typing import Final

from slurm_watchdog.analysis.hang_proof import who_never_joins
from slurm_watchdog.diagnose.hang_words import held_up_by
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Finding

STILL_SHARE: Final = 0.5
"""Of the patience with a start: dumps begin after half of it (analysis.stepless_runs.STEPLESS_AFTER)."""


def not_joining(job: JobView, finding: Finding, patience_s: float) -> Finding | None:
    """`finding` as BAD, with the ranks that all others wait for to join and that are stuck before they do, once
    `patience_s` have gone by without a step, half of them in the same place; None: it is not so, or not known.

    Never acted on: what a program does before it begins is hardly known.
    """
    seen = who_never_joins(job, STILL_SHARE * patience_s) if job.run_age_s >= patience_s else None
    if seen is None:
        return None
    culprits, voted, still_s = seen
    return finding.bad(
        f"Job {job.job.job_id} does not start: no step for {job.run_age_s:.0f} s; {held_up_by(culprits, voted)} "
        f"to join, and nobody has moved for {still_s:.0f} s.",
        duration_s=job.run_age_s,
        culprits=culprits,
    )
