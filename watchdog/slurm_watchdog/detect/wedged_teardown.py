"""`wedged_teardown`: the training is over, by its last step or by an error, and ranks that do nothing stay.

Fires: the last step is made, or an error ended the loop, and the ranks stay: after 10 min, or 30 while a rank works;
after 2 min where all that are left sit motionless in the teardown of their process group.
Names: the ranks that are still there.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import has_ended, is_unseen, last_error
from slurm_watchdog.analysis.progress_limit import has_grown_within, makes_steps, progress_limit, with_a_step
from slurm_watchdog.analysis.rank_activity import loop_state
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.spec import STORAGE, DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import what_they_do
from slurm_watchdog.diagnose.stacks.sentences import group_words
from slurm_watchdog.diagnose.stacks.vote import Vote, vote
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import ClusterView, ErrorLine, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, StackRequest

NAMED = 16
STACKS_APART_S = 15.0
STACKS_FROM_SHARE = 0.5  # From this share of the limit on, stacks are collected.

GRACE_S = 600.0  # Time that a job gets to end when it has made its last step.
TEARDOWN_S = 120.0  # Time that all ranks may sit motionless in the teardown of their process group.
BUSY_LIMIT_S = 1800.0  # In place of GRACE_S while a rank works (a checkpoint, an evaluation), or that is not known.


@each_job
def detect(view: ClusterView, job: JobView, hang: PhaseLimits) -> Finding:
    """One finding for each running job. `hang` has what the limits of steps are learnt by."""
    progress, now, alive = job.progress, view.now, job.living_ranks
    finding = SPEC.about_job(job.job.job_id)
    if is_unseen(job) or progress is None:
        return finding
    if not alive:
        return finding.ok(f"no rank of job {job.job.job_id} is left")
    if has_ended(job):
        age_s = min(progress.age_s, progress.phase_age_s) if progress.phase == "finishing" else progress.age_s
        return _after_last_step(job, replace(finding, duration_s=age_s), alive, now)
    error = last_error(job)
    if error is None:
        return _finding_without_last_step(job, finding, now, hang)
    finding = replace(finding, duration_s=error.age_s)
    return finding if job.gone_ranks else _after_error(job, finding, error, now, progress_limit(job, hang).seconds)


def _finding_without_last_step(job: JobView, finding: Finding, now: float, hang: PhaseLimits) -> Finding:
    """Many logs do not say that the training is over: the stacks do, if every rank is in its teardown, or
    most have left and every one that is left is. (Where few have left, `lingering_job` has its say.)"""
    assert job.progress is not None
    age_s = job.progress.age_s
    limit_s = max(progress_limit(job, hang).seconds, TEARDOWN_S)
    alive, gone = job.living_ranks, len(job.gone_ranks)
    unsure = finding.ok(f"job {job.job.job_id} trains") if makes_steps(job, hang) else finding
    if age_s < limit_s or 0 < gone < len(alive):
        return unsure
    voted = vote(job.snapshots, alive)
    if not (_torn_down(voted, len(alive)) and loop_state(job, now, TEARDOWN_S).stands):
        return unsure
    named = tuple(_still_there(rank) for rank in alive[:NAMED])
    what = f"made its last step {age_s:.0f} s ago, as its stacks say,"
    why = _by_stacks(voted)[1] + _have_left(gone, len(job.ranks))
    finding = replace(finding, duration_s=age_s, actionable=True)
    return _wedged_finding(job, finding, what, named, why, _places(voted))


def _torn_down(voted: Vote, ranks: int) -> bool:
    """Whether every rank was seen motionless in the teardown of its process group, and in nothing that takes
    its time."""
    there = sum(len(group.ranks) for group in voted.groups if group.place is Place.TEARDOWN)
    return there == ranks and voted.moving is False and not voted.checkpointing and not voted.undumped


def _after_error(job: JobView, finding: Finding, error: ErrorLine, now: float, limit_s: float) -> Finding:
    """An error ended the loop, and every rank is still there: reported if it is known that no rank does anything."""
    if finding.duration_s < limit_s or vote(job.snapshots, job.ranks).groups:
        return finding
    seen = loop_state(job, now, limit_s)
    if not seen.stands:
        return finding
    rank = next((r for r in job.ranks if r.process.rank == error.event.rank), None)
    named = seen.culprits if rank is None else (_still_there(rank),)
    what = f"ended with an error {error.age_s:.0f} s ago"
    return _wedged_finding(job, finding, what, named, seen.why, (error.event.line,))


def _after_last_step(job: JobView, finding: Finding, alive: Sequence[ProcessView], now: float) -> Finding:
    """The last step is made: reported after the grace if no rank does anything, later if that is not known."""
    if finding.duration_s >= STACKS_FROM_SHARE * TEARDOWN_S:
        finding = replace(finding, wanted=(StackRequest(job_id=job.job.job_id, apart_s=STACKS_APART_S),))
    voted = vote(job.snapshots, alive)
    seen = loop_state(job, now, GRACE_S)
    stands, why = (seen.stands, seen.why) if not voted.groups else _by_stacks(voted)
    patient_s = max(with_a_step(job, BUSY_LIMIT_S), GRACE_S)
    if stands:
        gone_quiet = loop_state(job, now, TEARDOWN_S).stands and _torn_down(voted, len(alive))
        patient_s = TEARDOWN_S if gone_quiet else GRACE_S
    if finding.duration_s < patient_s or (not stands and has_grown_within(job, GRACE_S)):
        return finding
    finding = replace(finding, actionable=stands is True)
    named = voted.outside or seen.culprits or tuple(_still_there(rank) for rank in alive[:NAMED])
    why += _have_left(len(job.ranks) - len(alive), len(job.ranks))
    what = f"made its last step {finding.duration_s:.0f} s ago"
    return _wedged_finding(job, finding, what, named, why, _places(voted))


def _have_left(gone: int, ranks: int) -> str:
    return f", {gone} of {ranks} ranks have left" if gone else ""


def _places(voted: Vote) -> tuple[str, ...]:
    return tuple(f"{group_words(g)}, {' < '.join(g.frames[:4])}" for g in voted.groups[:8])


def _by_stacks(voted: Vote) -> tuple[bool | None, str]:
    if voted.checkpointing or voted.moving:
        return False, "its ranks still save or move"
    tears = any(group.place is Place.TEARDOWN for group in voted.groups)
    why = "its ranks tear their process group down" if tears else "its ranks hang"
    return (True if voted.moving is False else None), why


def _still_there(rank: ProcessView) -> Culprit:
    return rank.culprit("is still there")


def _wedged_finding(
    job: JobView, finding: Finding, what: str, named: tuple[Culprit, ...], why: str, facts: tuple[str, ...]
) -> Finding:
    more = f" (and so are {len(named) - 1} more)" if len(named) > 1 else ""
    culprits_text = f"; {what_they_do(named[:1])}{more}" if named else ""
    return finding.bad(
        f"Job {job.job.job_id} {what} and does not end: {why}{culprits_text}.",
        culprits=named,
        facts=(*facts, f"nothing is left to save: scancel {job.job.job_id} frees its nodes"),
    )


SPEC = DetectorSpec(
    detect=detect,
    also=(CollectiveHang,),
    sentence="The job cannot end",
    job_state="cannot end",
    explained_by=(*STORAGE, IncidentKind.LINGERING_JOB, IncidentKind.RANK_STOPPED),
    not_delayed_by=(IncidentKind.LINGERING_JOB,),
    has_aftermath=False,
    wants_evidence=True,
    site_may_act=True,
    alerts=("SlurmWatchdogJobHangs",),
)
