"""What notifiers look up in the controller's view: how each job is, and which incidents are announced. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from watchdog.detect.view import ClusterView, JobView
from watchdog.model.incidents import Incident, IncidentState, Kind
from watchdog.model.slurm_states import RUNNING
from watchdog.notify.pulse import JobPulse


def is_announced(incident: Incident) -> bool:
    """Whether people were told of it: it fires, and no other one explains it."""
    return (
        incident.state is IncidentState.FIRING
        and incident.inhibited_by is None
        and incident.kind is not Kind.OPERATOR_RESTART
    )


def pulses(view: ClusterView, limits_s: Mapping[str, float], wall: float) -> tuple[JobPulse, ...]:
    """One for each job that runs or waits; `limits_s` by job id, `wall` is the date of now."""
    return tuple(_pulse(job, limits_s.get(job.job.job_id), wall) for job in (*view.jobs, *view.waiting))


def _pulse(view: JobView, limit_s: float | None, wall: float) -> JobPulse:
    job, progress = view.job, view.progress
    if job.state not in RUNNING:
        reason = "" if job.reason in ("", "None") else f" ({job.reason})"
        return JobPulse(job_id=job.job_id, user=job.user, name=job.name, waits_for=f"{job.state}{reason}")
    return JobPulse(
        job_id=job.job_id,
        user=job.user,
        name=job.name,
        nodes=job.nodes,
        running_s=view.run_age_s if job.start_at is None else max(0.0, wall - job.start_at),
        step=progress.known_step if progress else None,
        total_steps=progress.total_steps if progress else None,
        step_s=progress.step_s if progress else None,
        progress_age_s=progress.age_s if progress else None,
        limit_s=limit_s,
        phase=(progress.phase or "training") if progress else "starting",
    )
