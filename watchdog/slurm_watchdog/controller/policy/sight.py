"""Whether a controller sees well enough to act. Pure: the service and `replay` ask the same."""

from __future__ import annotations


def why_blind(
    *,
    journal_error: str | None,
    slurm_age_s: float | None,
    slurm_patience_s: float,
    slurm_problem: str,
    warming_s: float | None,
) -> str | None:
    """Why nothing may be done now, a sentence; None if all is seen well.

    `slurm_age_s`: of the newest listing, None if there is none; `slurm_problem`: why the newest answer was of
    no use, if it was not;
    `warming_s`: for how long in all a controller that has just started only observes, None if it is warm.
    """
    if journal_error is not None:
        return f"the journal cannot be written: {journal_error}"
    if slurm_age_s is None or slurm_age_s > slurm_patience_s:
        since = "yet" if slurm_age_s is None else f"for {slurm_age_s:.0f} s"
        return (
            f"Slurm's answer cannot be used ({slurm_problem})" if slurm_problem else f"Slurm has not answered {since}"
        )
    if warming_s is not None:
        return f"the controller has just started, or was stalled: it only observes for {warming_s:.0f} s"
    return None
