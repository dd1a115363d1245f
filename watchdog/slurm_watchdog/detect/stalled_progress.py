"""`stalled_progress`: no step beyond the limit, and no other detector has a better name for it.

Before the first step there is no limit that was learned: to load, to index and to compile may take an hour. A program
that never writes a step which can be read, and one that trains nothing, look alike without end. So `start_limit` is
long, the log has to show a training (or an earlier run has made steps), and the ranks have to be known to be idle.

Fires: no step beyond the limit: at once if no rank does anything and no stack shows more; after `still_limit` (10 min)
if all stacks are motionless outside of any collective; else after `busy_limit` (30 min; 45 min while a checkpoint is
seen to be written, 2 h in an evaluation while all GPUs compute as in training). Or no first step for 90 min
(`start_limit`), of a training whose log can be read and whose ranks are known to be idle.
Names: the ranks that do nothing while others work, if that is clear.
Acts: where the stacks of all ranks do not move; without ptrace by processes and GPUs alone (`act_without_stacks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import has_ended, is_unseen, rank_on_storage
from slurm_watchdog.analysis.progress_limit import (
    ENDS,
    Limit,
    LoopClock,
    has_grown_since,
    has_just_grown,
    loop_clock,
    makes_steps,
    may_be_right,
    progress_limit,
    with_a_step,
)
from slurm_watchdog.analysis.rank_activity import LoopState, all_compute, few_idle_among_busy, loop_state
from slurm_watchdog.detect.collective_hang import CollectiveHang, hang_finding
from slurm_watchdog.detect.spec import BROKEN, HANGS, DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import what_they_do
from slurm_watchdog.diagnose.hang_findings import phase_fact
from slurm_watchdog.diagnose.stacks.vote import Vote, vote
from slurm_watchdog.knowledge.limits import span, span_or_never
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity, Truth

STACKS_PATIENCE_S = 10.0  # Stacks that were asked for at half the limit get so much more time: they count more.

PLACES_TOLD = 3  # Groups of ranks whose place is in the sentence.

EVALUATING = 4.0
"""An evaluation of a whole set of data takes an hour or two. While every GPU draws what it draws in training no one
waits for anybody, and one that the log announces may take so many times its floor."""

SAVING = 1.5
"""A checkpoint that the log or the stacks tell of may take as many times its floor: with the steps around it,
and a log that has a line every few of them, half an hour of writing is more than half an hour without a step
(six false alarms in 426 simulated hours of such jobs). One whose files grow may take as long as they do."""


@dataclass(frozen=True, kw_only=True)
class StalledProgress:
    """No step beyond the limit of `collective_hang`, and no better name for it. Acted on only where `except` has a
    ladder for it, as `slurm-watchdog run` does, and the stacks of all ranks are known not to move."""

    busy_limit: float = span(1800.0, "Limit while a rank works, or that is not known.")
    still_limit: float = span(600.0, "Limit where no rank does anything and none waits in a collective.")
    act_without_stacks: float = span_or_never(0.0, "Without any stack, a ladder acts after this; 0s = never.")
    start_limit: float = span(5400.0, "Time to the first step, reported only if ranks are known to do nothing.")


@each_job
def detect(view: ClusterView, job: JobView, settings: StalledProgress, hang: CollectiveHang) -> Finding:
    """One finding for each running job. `hang` has what its limits are learnt by."""
    job_id, progress, now = job.job.job_id, job.progress, view.now
    finding = SPEC.about_job(job_id)
    if is_unseen(job) or not job.living_ranks:
        return finding
    clock = loop_clock(job, now, hang)
    if clock.unread and clock.age_s >= clock.limit.seconds:
        return _without_steps(job, finding, clock, now, hang)
    if progress is None:
        return _before_the_first_step(job, finding, now, hang, settings)
    if has_ended(job):
        return finding
    limit, age_s = progress_limit(job, hang), progress.age_s
    finding = replace(finding, duration_s=age_s)
    if age_s < limit.seconds:
        known = not progress.shared and makes_steps(job, hang)
        return finding.ok(f"job {job_id} makes progress") if known else finding
    if hang_finding(job, now, hang).truth is Truth.BAD:
        return finding
    evidence = _evidence(job, now, limit.seconds)
    waits_for_stacks = not job.snapshots and age_s < limit.seconds + STACKS_PATIENCE_S
    patient = age_s < _patient_s(job, now, limit, hang, settings) or has_just_grown(job)
    if patient and (not evidence.stands or waits_for_stacks):
        return finding
    still = _stands_still(job, vote(job.snapshots, job.ranks), now, limit.seconds)
    still = still or _stands_without_stacks(job, evidence, age_s, settings)
    beyond = f"no step for {age_s:.0f} s (limit {limit.seconds:.0f} s, {limit.reason})"
    what = f"makes no progress since {progress.place}: {beyond}"
    return _bad_finding(job, finding, what, evidence, actionable=still)


def _patient_s(job: JobView, now: float, limit: Limit, hang: CollectiveHang, settings: StalledProgress) -> float:
    """How long no one is accused of what nothing but the time speaks for. The stacks of the step after a
    checkpoint do not show any more what took so long: that they did is remembered until that step is due."""
    voted = vote(job.snapshots, job.ranks)
    still = _stands_still(job, voted, now, limit.seconds)
    patient_s = max(with_a_step(job, settings.still_limit if still else settings.busy_limit), limit.seconds)
    evaluates = job.progress is not None and job.progress.phase == "evaluating"
    if evaluates and all_compute(job, now, limit.seconds):
        patient_s = max(patient_s, EVALUATING * with_a_step(job, hang.evaluation_floor))
    saved = job.saving_age_s is not None and job.saving_age_s < limit.seconds
    if job.progress is not None:
        saved = saved or has_grown_since(job, job.progress.age_s) or job.progress.phase == "checkpointing"
    if saved or voted.checkpointing:
        patient_s = max(patient_s, SAVING * with_a_step(job, hang.checkpoint_floor))
    return patient_s


def _stands_still(job: JobView, voted: Vote, now: float, limit_s: float) -> bool:
    """Whether every rank was dumped, none of them moves, computes or does what takes its time, and none is
    seen to work since.

    Several ranks that all make their samples themselves wait for no one: an evaluation in the training's own
    function looks like that."""
    known = voted.moving is False and not voted.missing and not voted.undumped
    together = voted.in_own_code and len(job.ranks) > 1
    at_it = voted.checkpointing or voted.patient or together or rank_on_storage(job) is not None
    return known and not at_it and loop_state(job, now, limit_s).stands is True


def _stands_without_stacks(job: JobView, evidence: LoopState, age_s: float, settings: StalledProgress) -> bool:
    """The proof of a site without ptrace: it wants to act on it, and nothing was seen of any rank for long."""
    wanted_s = settings.act_without_stacks
    long = wanted_s > 0 and age_s >= with_a_step(job, max(wanted_s, settings.busy_limit))
    return long and evidence.stands is True and not any(each.stacks for each in job.snapshots)


def _without_steps(job: JobView, finding: Finding, clock: LoopClock, now: float, hang: CollectiveHang) -> Finding:
    """Of a run whose steps cannot be read, which has stopped after it had moved as a training does: BAD if it
    is known that no rank does anything. Acted on only where a ladder is configured for it, and where the
    stacks themselves show that every rank hangs."""
    finding = replace(finding, duration_s=clock.age_s)
    if hang_finding(job, now, hang).truth is Truth.BAD:
        return finding
    limit_s = clock.limit.seconds
    evidence = _evidence(job, now, limit_s)
    saves = job.saving_age_s is not None and job.saving_age_s < SAVING * hang.checkpoint_floor
    voted = vote(job.snapshots, job.ranks)
    still = _stands_still(job, voted, now, limit_s) if voted.groups else evidence.stands is True
    dumped = [Culprit(node=rank.node, pid=rank.process.pid, reason="") for rank in job.ranks if voted.groups]
    if not still or saves or has_just_grown(job) or may_be_right(job, clock, tuple(dumped), now):
        return finding
    what = (
        f"has stopped after it had trained, and its steps cannot be read: {clock.words} "
        f"(limit {limit_s:.0f} s, {clock.limit.reason})"
    )
    return _bad_finding(job, finding, what, evidence, actionable=bool(voted.groups))


def _before_the_first_step(
    job: JobView, finding: Finding, now: float, hang: CollectiveHang, settings: StalledProgress
) -> Finding:
    age_s, limit_s = job.run_age_s, settings.start_limit
    if age_s < limit_s:
        return finding
    finding = replace(finding, duration_s=age_s)
    trains = job.phase is not None or any(run.steps_seen for run in job.past)
    if job.log is None or not job.log.whole or not trains or job.phase == ENDS:
        return finding
    if hang_finding(job, now, hang).truth is Truth.BAD:
        return finding
    seen = _evidence(job, now, limit_s)
    if not seen.stands and not vote(job.snapshots, job.ranks).groups:
        seen = few_idle_among_busy(job, now, limit_s)
    if not seen.stands or (seen.in_collective and job.log.grew_age_s < limit_s / 2):
        return finding
    what = (
        f"has made no first step for {age_s:.0f} s (limit {limit_s:.0f} s, phase {job.phase or 'starting'}), "
        f"and its log is silent since {job.log.grew_age_s:.0f} s"
    )
    return _bad_finding(job, finding, what, seen)


def _evidence(job: JobView, now: float, limit_s: float) -> LoopState:
    """What speaks for a loop that stands. Where there are stacks, they speak first; a job that has lost a
    rank is another matter."""
    ranks = job.ranks
    if not all(rank.alive for rank in ranks):
        return LoopState(why="a rank has exited")
    if rank_on_storage(job) is not None:
        return LoopState(why="a rank is blocked on a filesystem")
    voted = vote(job.snapshots, ranks)
    if voted.groups and _stands_still(job, voted, now, limit_s):
        if len(ranks) == 1:
            return LoopState(why="its only process does nothing", culprits=_sole(ranks[0], voted))
        return LoopState(why=f"no rank does anything, and none waits in a collective: {_where(voted, len(ranks))}")
    if voted.groups:
        return LoopState(why="the stacks do not show that anybody waits for anybody")
    return loop_state(job, now, limit_s)


def _sole(rank: ProcessView, voted: Vote) -> tuple[Culprit, ...]:
    """The only process of a job, with where it stands."""
    group = voted.groups[0]
    where = f"in {group.frames[0]}" if group.frames else "in no function that is known"
    reason = f"hangs {where}" if group.place is Place.OTHER or voted.in_own_code else f"{group.place}, {where}"
    return (rank.culprit(reason),)


def _where(voted: Vote, ranks: int) -> str:
    """`3 of 4 in recv (socket.py), 1 in forward (train.py)`: the first groups, for the odd one may be the small one."""
    places = [(len(group.ranks), group.frames[0]) for group in voted.groups[:PLACES_TOLD] if group.frames]
    if not places:
        return "no rank moves"
    (count, first), *others = places
    rest = "".join(f", {number} in {frame}" for number, frame in others)
    more = len(voted.groups) - PLACES_TOLD
    return f"{count} of {ranks} in {first}{rest}" + (f", and in {more} more places" if more > 0 else "")


def _bad_finding(
    job: JobView, finding: Finding, what: str, evidence: LoopState, *, actionable: bool = False
) -> Finding:
    named = f"; {what_they_do(evidence.culprits)}" if evidence.culprits else ", so no rank is identified"
    return finding.bad(
        f"Job {job.job.job_id} {what}; {evidence.why}{named}.",
        culprits=evidence.culprits,
        facts=(phase_fact(job), "the stacks that were collected are with the incident: slurm-watchdog show INCIDENT"),
        actionable=actionable,
    )


SPEC = DetectorSpec(
    detect=detect,
    settings=StalledProgress,
    also=(CollectiveHang,),
    severity=Severity.CRITICAL,
    blames_node=0.5,
    sentence="No progress",
    job_state="hangs",
    explained_by=(*BROKEN, *HANGS, IncidentKind.RANK_STOPPED, IncidentKind.DEAD_RANK, IncidentKind.LOG_ERROR),
    not_delayed_by=HANGS,
    has_aftermath=False,
    wants_evidence=True,
    site_may_act=True,
    alerts=("SlurmWatchdogJobHangs",),
)
