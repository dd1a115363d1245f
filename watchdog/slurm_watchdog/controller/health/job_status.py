"""What notifiers look up in the controller's view: how each job is, and which incidents are announced. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_watchdog.controller.health.cluster import Health
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.documents import JobHealth, Level
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.notify.job_status_message import JobPulse


def pulses(view: ClusterView, limits_s: Mapping[str, float], wall: float, health: Health) -> tuple[JobPulse, ...]:
    """One for each job that runs or waits; `limits_s` by job id, `wall` is the date of now, `health` how they are."""
    found = {each.job_id: each for each in health.jobs}
    return tuple(
        _pulse(job, limits_s.get(job.job.job_id), wall, found.get(job.job.job_id))
        for job in (*view.jobs, *view.waiting)
    )


def _pulse(view: JobView, limit_s: float | None, wall: float, health: JobHealth | None) -> JobPulse:
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
        phase=None if health is None else health.state,
        level=Level.UNKNOWN if health is None else health.level,
        reason="" if health is None else health.reason,
    )
