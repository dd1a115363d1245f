"""`loss_nan`: the loss is NaN or infinite, several times in a row: mixed precision skips a single such step.

Fires: three losses in a row are NaN or infinite.
Names: no rank or node: since which step, and from which a restart resumes.
Acts: where the newest complete checkpoint is older than that step and none is being written; the job is not asked to
save.
"""

from __future__ import annotations

from itertools import takewhile
from math import isfinite

from slurm_watchdog.analysis.good_checkpoint import resumes_before
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.knowledge.limits import NAN_STEPS
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, Severity


@each_job
def detect(view: ClusterView, job: JobView) -> Finding:
    """One finding for each running job."""
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id)
    if not job.losses:
        return finding
    bad = list(takewhile(lambda point: not isfinite(point.loss), reversed(job.losses)))
    if len(bad) < NAN_STEPS:
        return finding.ok(f"the loss of job {job_id} is a number")
    first, last = bad[-1], job.losses[-len(bad) - 1] if len(job.losses) > len(bad) else None
    good = f"; the last good one was {last.loss:.4g} at step {last.step}" if last is not None else ""
    resumes = resumes_before(job, first.step)
    return finding.bad(
        f"The loss of job {job_id} has been NaN or infinite since step {first.step}, {len(bad)} times in a row{good}.",
        facts=("what is trained from here on is lost: go back to a checkpoint before that step", resumes.fact),
        actionable=resumes.helps and last is not None,
        good_checkpoint=resumes.good_path if last is not None else "",
        duration_s=max(0.0, view.now - first.at),
    )


SPEC = DetectorSpec(
    detect=detect,
    severity=Severity.CRITICAL,
    sentence="The loss is NaN or infinite",
    site_may_act=True,
    asks=False,
    alerts=("SlurmWatchdogSlow",),
)
