"""How far a replay may skip ahead while all jobs are healthy and time alone changes nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_watchdog.analysis.job_state import has_ended
from slurm_watchdog.analysis.learned_limit import Limit
from slurm_watchdog.analysis.progress_limit import STACKS_FROM_SHARE, wants_stacks
from slurm_watchdog.model.cluster_view import ClusterView, JobView

PAUSE_S = 10.0
"""Two report intervals: what is averaged over a minute and more (GPUs, rates, step times) needs no more looks."""


def skip_ahead_s(view: ClusterView, limits_s: Mapping[str, float]) -> float:
    """Seconds from `view.now` in which nothing that is judged can change by itself; 0 unless everything is as usual.

    `limits_s`: job -> the longest time without a step that is normal for it.
    """
    if view.ended or view.waiting or view.filesystems or view.silent_nodes or not view.jobs:
        return 0.0
    if not all(node.quiet for node in view.nodes):
        return 0.0
    if not all(_is_calm(job, limits_s.get(job.job.job_id, 0.0)) for job in view.jobs):
        return 0.0
    heard_at = min((node.reported_at for node in view.nodes), default=view.now)
    return max(0.0, min(PAUSE_S, heard_at + (view.silent_after_s or 0.0) - view.now))


def _is_calm(job: JobView, limit_s: float) -> bool:
    """Whether the job trains, and no limit is near."""
    progress = job.progress
    if progress is None or job.snapshots or job.errors or has_ended(job):
        return False
    age_s = progress.age_s + PAUSE_S
    if age_s >= STACKS_FROM_SHARE * limit_s or wants_stacks(job, Limit(seconds=limit_s, reason=""), age_s):
        return False
    return all(
        each.gone_s is None and each.process.state in ("R", "S", "I", "?") for each in job.processes
    ) and all(each.process.blocked is None for each in job.processes)
