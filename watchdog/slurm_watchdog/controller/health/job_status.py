"""What a periodic message says of all jobs: a headline and a line about each. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_watchdog.base.text import duration, fold, one_line, plural
from slurm_watchdog.controller.health.cluster import Health
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.documents import JobHealth, Level
from slurm_watchdog.model.slurm_states import RUNNING

LINE_LIMIT = 300


def pulses(view: ClusterView, limits_s: Mapping[str, float], wall: float, health: Health) -> list[str]:
    """How many jobs there are, then those that make no steps, those that run, those that wait; empty for no jobs.
    `limits_s` by job id, `wall` is the date of now, `health` how they are."""
    found = {each.job_id: each for each in health.jobs}
    all_jobs = (*view.jobs, *view.waiting)
    lines = [_line(job, limits_s.get(job.job.job_id), wall, found.get(job.job.job_id)) for job in all_jobs]
    lines.sort(key=lambda each: each[0])
    running = sum(rank < 2 for rank, _ in lines)
    head = f"{plural(running, 'job')} running, {len(lines) - running} waiting"
    return [head, *(one_line(line, LINE_LIMIT) for _, line in lines)] if lines else []


def _line(view: JobView, limit_s: float | None, wall: float, health: JobHealth | None) -> tuple[int, str]:
    """One job, with its rank: 0 is late or unwell, 1 runs, 2 waits."""
    job, progress = view.job, view.progress
    whose = " ".join(filter(None, (job.name, f"of {job.user}" if job.user else "")))
    head = f"job {job.job_id}{f' ({whose})' if whose else ''}"
    if job.state not in RUNNING:
        reason = "" if job.reason in ("", "None") else f" ({job.reason})"
        return 2, f"{head} waits: {job.state}{reason}"
    running_s = view.run_age_s if job.start_at is None else max(0.0, wall - job.start_at)
    parts = [f"{head} runs since {duration(running_s)} on {','.join(fold(job.nodes)) or 'no node'}"]
    why = "" if health is None else health.reason
    step = progress.known_step if progress else None
    if progress is None or step is None:
        parts.append("no step yet" if why else f"no step yet ({'starting' if health is None else health.state})")
    else:
        of = f" of {progress.total_steps}" if progress.total_steps else ""
        parts.append(f"step {step}{of}")
        if progress.step_s:
            parts.append(f"{progress.step_s:.3g} s a step")
            if (left := (progress.total_steps or 0) - step) > 0:
                parts.append(f"{duration(left * progress.step_s)} to go")
    age_s = progress.age_s if progress else None
    late = age_s is not None and limit_s is not None and age_s > limit_s
    if late:
        parts.append(f"NO STEP for {duration(age_s or 0.0)}")
    if health is not None and (health.state not in ("training", "starting") or why):
        state = health.state.upper() if health.level is Level.CRITICAL else health.state
        parts.append(f"{state}: {why}" if why else state)
    unwell = health is None or health.level is not Level.OK
    return (0 if late or unwell else 1), ", ".join(parts)
