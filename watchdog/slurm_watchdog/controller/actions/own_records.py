"""What a controller writes into its recording about itself: without it a replay could not decide as it did."""

from __future__ import annotations

from slurm_watchdog.controller.ports.given import RestartRequest
from slurm_watchdog.model.actions import ActionEnd, Decision
from slurm_watchdog.trace.records import Asked, Ended, Touched

UNDATED = 0.0  # The recorder dates every record.


def subject_of(decision: Decision) -> str:
    """What an action is about, as a recording has it: `JOB.RESTARTS` or `NODE/PID`."""
    process, fence = decision.process, decision.fence
    if process is not None:
        return f"{process.node}/{process.pid}"
    return "" if fence is None else f"{fence.job_id}.{fence.restarts}"


def asked(request: RestartRequest) -> Asked:
    """An operator's request."""
    return Asked(
        t=UNDATED,
        job_id=request.job.job_id,
        by=request.asked_by,
        reason=request.reason,
        exclude=list(request.exclude),
        now=request.at_once,
        wish=request.wish,
        within_s=request.within_s,
    )


def touched(job_id: str, restarts: int, age_s: float | None) -> Touched:
    """An operation has begun that ends the run or makes it save, so long ago; None: the run continues without it."""
    return Touched(t=UNDATED, job_id=job_id, restarts=restarts, age_s=None if age_s is None else max(0.0, age_s))


def ended(decision: Decision, end: ActionEnd) -> Ended:
    """An action's end."""
    return Ended(t=UNDATED, subject=subject_of(decision), ok=end.ok, detail=end.detail)
