"""`loss_spike`: the loss jumps far above where it was. Most recover within some 30 steps.

Fires: three losses in a row are 8 deviations and 10 % above the recent ones.
Names: no rank or node: since which step, and from which a restart resumes.
Acts: after 100 steps of it, where the newest complete checkpoint is older and none is being written; the job is not
asked to save.
"""

from __future__ import annotations

from math import isfinite

from slurm_watchdog.analysis.good_checkpoint import resumes_before
from slurm_watchdog.analysis.loss_spikes import LEAST, NEWEST, Spike, find_spikes
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.knowledge.remediation_hints import hints_for
from slurm_watchdog.model.cluster_view import ClusterView, JobView, LossPoint
from slurm_watchdog.model.incidents import Finding

LASTS_STEPS = 100  # Three times of what most spikes take to recover: before that nothing is done.


@each_job
def detect(view: ClusterView, job: JobView) -> Finding:
    """One finding for each running job."""
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id)
    points, spike = _spike(job.losses)
    if len(points) < LEAST + NEWEST:
        return finding
    if spike is None:
        return finding.ok(f"the loss of job {job_id} is {points[-1].loss:.4g}")
    first, usual = points[spike.begin], spike.usual
    resumes = resumes_before(job, first.step)
    # In the first losses that are kept, where it began may have been forgotten.
    is_clear = spike.begin > LEAST and points[-1].step - first.step >= LASTS_STEPS
    return finding.bad(
        f"The loss of job {job_id} jumped at step {first.step}: {points[-1].loss:.4g} now, {usual:.4g} before.",
        facts=("most spikes recover within 30 steps; if not, go back to a checkpoint and skip the data", resumes.fact),
        actionable=resumes.helps and is_clear,
        good_checkpoint=resumes.good_path if is_clear else "",
        duration_s=max(0.0, view.now - first.at),
    )


@by_identity
def _spike(losses: tuple[LossPoint, ...]) -> tuple[tuple[LossPoint, ...], Spike | None]:
    """The losses that are numbers, and the spike that the newest ones are in."""
    points = tuple(point for point in losses if isfinite(point.loss))
    spikes = find_spikes([point.loss for point in points])
    return points, next((spike for spike in spikes if spike.end is None), None)


SPEC = DetectorSpec(
    detect=detect,
    sentence="The loss has jumped",
    site_may_act=True,
    asks=False,
    hint=hints_for("loss_spike", "")[0],
)
