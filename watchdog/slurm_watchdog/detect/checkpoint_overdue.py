"""`checkpoint_overdue`: the job makes steps, and has not saved for much longer than it used to.

Fires: steps continue, and nothing was saved for 3 × the usual time between checkpoints, at least 30 min.
Names: no rank or node.
"""

from __future__ import annotations

from slurm_watchdog.base.averages import median
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding

FACTOR = 3.0  # Of the usual time between its checkpoints.
FLOOR_S = 1800.0  # Never sooner than this after the last one: less work than that is lost by many a restart.
LONGEST = 2.0  # Of the longest recent interval: for a job that saves irregularly, or slows down while its batch grows.


@each_job
def detect(view: ClusterView, job: JobView) -> Finding | None:
    """One finding for each running job that has saved twice in this run, or more often: the others have no rhythm."""
    job_id, checkpoint, progress = job.job.job_id, job.checkpoint, job.progress
    if checkpoint is None or not job.checkpoint_intervals_s:
        return None
    finding = SPEC.about_job(job_id)
    if job.job.state != "RUNNING" or job.silent_nodes or progress is None or progress.last_increase_age_s is None:
        return finding
    if any(each.error for each in job.checkpoints_on_disk):
        return finding
    usual_s = median(job.checkpoint_intervals_s)
    limit_s = max(FACTOR * usual_s, LONGEST * max(job.checkpoint_intervals_s), FLOOR_S)
    newer = any(each.step is not None and each.step > checkpoint.step for each in job.checkpoints_on_disk)
    age_s = min(checkpoint.age_s, job.run_age_s)
    if checkpoint.age_s < limit_s:
        return finding.ok(f"job {job_id} saves as it used to")
    if age_s < limit_s or job.is_writing or newer:
        return finding
    if not progress.step_known or progress.step <= checkpoint.step or progress.last_increase_age_s > usual_s:
        return finding
    before = (
        f"{len(job.checkpoint_intervals_s) + 1} checkpoints before, at most {max(job.checkpoint_intervals_s):.0f} s"
    )
    return finding.bad(
        f"Job {job_id} has not completed a checkpoint for {age_s:.0f} s, since step {checkpoint.step}; it used to save "
        f"every {usual_s:.0f} s and is at step {progress.step} now. A crash would lose all of that.",
        facts=(f"{before} apart",),
        duration_s=max(0.0, age_s - limit_s),
    )


SPEC = DetectorSpec(
    detect=detect,
    sentence="A checkpoint is overdue",
    alerts=("SlurmWatchdogSlow",),
)
