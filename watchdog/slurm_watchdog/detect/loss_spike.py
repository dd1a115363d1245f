"""`loss_spike`: the loss jumps far above where it was. Most recover by themselves within some 30 steps.

Fires: three losses in a row are 8 deviations and 10 % above the recent ones.
Names: no rank or node: since which step, and from which a restart resumes.
Note: acted on only after 100 steps of it, and where the newest complete checkpoint is known and older, and no newer one
is being written; the job is not asked to save, for it would save what is damaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import median

from slurm_watchdog.analysis.good_checkpoint import resumes_before
from slurm_watchdog.analysis.memo import by_identity
from slurm_watchdog.analysis.step_statistics import MAD_TO_SIGMA
from slurm_watchdog.detect.spec import DetectorSpec, Subject, option
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView, LossPoint
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity

WINDOW = 100
"""Losses before the newest ones that say what is usual."""
LEAST = 20
NEWEST = 3
"""So many in a row have to be high: one outlier is a bad batch. As many have to be low again for the end."""
LEARN_EVERY = 20
LASTS_STEPS = 100
"""Three times of what most spikes take to recover: before that nothing is done."""


@dataclass(frozen=True, kw_only=True)
class LossSpike:
    """The loss jumps far above where it was. Most spikes recover: acted on only where `policy.kinds` has a
    ladder for it, it lasts, and a restart resumes from before."""

    deviations: float = option(8.0, "Standard deviations above the recent losses, …", ge=3)
    percent: float = option(10.0, "… and more than this above their median.", ge=1)


def detect(view: ClusterView, settings: LossSpike) -> list[Finding]:
    """One finding for each running job."""
    return [_job_finding(job, view.now, settings) for job in view.jobs]


def _job_finding(job: JobView, now: float, settings: LossSpike) -> Finding:
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id, f"too few losses of job {job_id} were seen")
    points, spike = _spike(job.losses, settings.deviations, settings.percent)
    if len(points) < LEAST + NEWEST:
        return finding
    if spike is None:
        return finding.ok(f"the loss of job {job_id} is {points[-1].loss:.4g}")
    first, usual = points[spike[0]], spike[1]
    resumes = resumes_before(job, first.step)
    # In the first losses that are kept, where it began may have been forgotten.
    is_clear = spike[0] > LEAST and points[-1].step - first.step >= LASTS_STEPS
    return finding.bad(
        f"The loss of job {job_id} jumped at step {first.step}: {points[-1].loss:.4g} now, {usual:.4g} before.",
        facts=(
            "most spikes recover by themselves within some 30 steps; if not, go back to a checkpoint and skip the data",
            resumes.fact,
        ),
        actionable=resumes.helps and is_clear,
        good_checkpoint=resumes.good_path if is_clear else "",
        duration_s=max(0.0, now - first.at),
        wanted=() if resumes.keep is None else (resumes.keep,),
    )


@by_identity
def _spike(
    losses: tuple[LossPoint, ...], deviations: float, percent: float
) -> tuple[tuple[LossPoint, ...], tuple[int, float] | None]:
    """The losses that are numbers, and what find_spike() says of them."""
    points = tuple(point for point in losses if isfinite(point.loss))
    if len(points) < LEAST + NEWEST:
        return points, None
    return points, find_spike(tuple(point.loss for point in points), deviations, percent)


def find_spike(losses: tuple[float, ...], deviations: float, percent: float) -> tuple[int, float] | None:
    """(place of the first high loss, usual loss) if the newest losses are in a spike; None otherwise.

    Losses within a spike do not teach what is usual, however long it lasts.
    """
    usual_ones: list[float] = list(losses[:LEAST])
    limit, usual = _limit(usual_ones, deviations, percent)
    began: int | None = None
    run = 0
    """Losses in a row on the other side of the limit than the state says."""
    for place, loss in enumerate(losses[LEAST:], LEAST):
        is_high = loss > limit
        run = run + 1 if is_high is (began is None) else 0
        if run >= NEWEST:
            began, run = (place - NEWEST + 1 if began is None else None), 0
        if began is None and not is_high:
            usual_ones.append(loss)
            if len(usual_ones) % LEARN_EVERY == 0:
                limit, usual = _limit(usual_ones[-WINDOW:], deviations, percent)
    return None if began is None else (began, usual)


def _limit(losses: list[float], deviations: float, percent: float) -> tuple[float, float]:
    """(what counts as high, median) of usual losses."""
    usual = median(losses)
    sigma = MAD_TO_SIGMA * median([abs(loss - usual) for loss in losses])
    return usual + max(deviations * sigma, abs(usual) * percent / 100), usual


SPEC = DetectorSpec(
    kind=IncidentKind.LOSS_SPIKE,
    detect=detect,
    settings=LossSpike,
    subject=Subject.JOB,
    severity=Severity.WARNING,
    sentence="The loss has jumped",
    site_may_act=True,
    asks=False,
    hint=Hint(
        usually="Often it recovers by itself within some tens of steps.",
        try_next="Wait; if not: restart from before and skip the batches, lower the learning rate.",
    ),
)
