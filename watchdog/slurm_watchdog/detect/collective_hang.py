"""`collective_hang`: every rank is alive, the loop makes no step, and stacks show which rank keeps the others waiting.

Fires: every rank is alive and no step was made for longer than the job's own limit: 3 × its slowest recent step, at
least 60 s; 30 min in an evaluation or a checkpoint that may be at work, 5 min where nothing is at work
in it; 1 h until 5 steps were seen. From 10 s (`proven_floor`) on if several dumps prove the hang. Without any step,
after 10 min (`stepless_limit`) if a few ranks do not join the others and dumps over 5 min show these stuck. How each
limit is found: how-it-judges.md.
Names: ranks outside of the collective in which the others wait, and ranks that cannot be dumped; none that moves data,
and none whose workers compute. If all ranks wait in one collective: the few whose GPUs idle while the others' spin,
else none, with the links of their nodes that are down. Flight Recorder dumps and NCCL's RAS add to that (evidence.md).
Acts: restarts the job if its stacks do not move, none of its processes is blocked on a filesystem and no checkpoint
grows; after a second look if the hang was proven before the limit; never a rank at a debugger's prompt. If all ranks
are in one collective: after 2 min if each is known to do nothing else and no link is down, else
after 30 min (`busy_limit`). Without stacks: by GPUs that spin beside few that idle, after `busy_limit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.hang_proof import early_stacks, nothing_at_work, proof_of_hang, who_never_joins
from slurm_watchdog.analysis.job_state import has_ended, is_unseen, moves_data
from slurm_watchdog.analysis.lateness import late_after_s
from slurm_watchdog.analysis.memory_kills import memory_kills
from slurm_watchdog.analysis.progress_limit import (
    LoopClock,
    acted_on_after_s,
    has_grown_since,
    has_just_grown,
    limit_by_stacks,
    limit_of_idle_phase,
    limit_of_known_evaluation,
    loop_clock,
    makes_steps,
    may_be_right,
    nobody_answers,
    stacks_wanted,
    wants_stacks,
    with_a_step,
)
from slurm_watchdog.analysis.rank_activity import is_quiet, loop_state
from slurm_watchdog.base.text import duration
from slurm_watchdog.detect.spec import STORAGE, DetectorSpec, each_job
from slurm_watchdog.diagnose.hang_findings import (
    error_window_s,
    facts_of,
    finding_beyond_limit,
    finding_by_gpus,
    held_up_by,
    proven_finding,
    spinning_finding,
    standing_alone,
    with_kill,
    with_logged_cause,
)
from slurm_watchdog.diagnose.recorded_collectives import LOOK_EVERY_S, all_wait, with_everybody, with_other_sources
from slurm_watchdog.diagnose.stacks.spinning import is_named_waiting, keeps_the_lock, where
from slurm_watchdog.diagnose.stacks.vote import Vote, vote
from slurm_watchdog.knowledge.limits import PhaseLimits, span
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity, StackRequest, Truth
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.past_runs import Steady


@dataclass(frozen=True, kw_only=True)
class CollectiveHang(PhaseLimits):
    """Ranks are alive, the training loop does not turn."""

    proven_floor: float = span(10.0, "As `floor`, of a hang that stack dumps prove; equal to `floor` = no proof.")
    everybody_limit: float = 120.0
    """A job that trains and whose ranks all wait in one collective is acted on after this time, where it is known of
    each that it does nothing else, and no link of their nodes is down."""


@each_job
def detect(view: ClusterView, job: JobView, settings: CollectiveHang) -> Finding:
    """One finding for each running job, with what else is known of its cause. At a debugger's prompt someone has a
    terminal, and a restart would come to the same breakpoint again: it is only reported, as a rank that a debugger
    holds is."""
    found = hang_finding(job, view.now, settings)
    if found.truth is Truth.BAD:
        window_s = error_window_s(job, loop_clock(job, view.now, settings), settings)
        found = with_kill(job, found, memory_kills(view), view.now) or with_logged_cause(job, found, view.now, window_s)
    found = with_other_sources(job, found, view.nodes, with_a_step(job, settings.busy_limit))
    if not found.actionable or not any(each.reason.startswith(Place.DEBUGGER) for each in found.culprits):
        return found
    return replace(found, actionable=False, facts=(*found.facts, "a debugger waits for a person: nothing is restarted"))


def hang_finding(job: JobView, now: float, settings: CollectiveHang) -> Finding:
    """What is to be said about one job."""
    finding = SPEC.about_job(job.job.job_id)
    if is_unseen(job) or job.gone_ranks or has_ended(job):
        return finding
    clock = loop_clock(job, now, settings)
    limit, age_s = clock.limit, clock.age_s
    soonest = limit_of_idle_phase(job, limit_of_known_evaluation(job, limit, settings), settings)
    wanted = stacks_wanted(job, replace(clock, limit=soonest), settings)
    finding = replace(finding, wanted=wanted, duration_s=age_s)
    absent = not_joined(job, finding, settings.stepless_limit)
    if absent is None and age_s < limit.seconds:
        absent = not_joining(job, finding, settings.stepless_limit)
    if absent is not None:
        return replace(absent, facts=facts_of(job, vote(job.snapshots, job.ranks)))
    early = _before_the_limit(job, finding, clock, settings)
    if early is not None:
        return early
    if age_s < limit.seconds and makes_steps(job, settings) and not wants_stacks(job, soonest, age_s):
        return finding.ok(f"job {job.job.job_id} makes progress")
    if age_s < limit.seconds and not wanted:
        return finding
    return _by_stacks(job, now, finding, clock, settings)


def _by_stacks(job: JobView, now: float, finding: Finding, clock: LoopClock, settings: CollectiveHang) -> Finding:
    """Of a job whose stacks are asked for."""
    age_s, voted = clock.age_s, vote(job.snapshots, job.ranks)
    limit = limit_of_known_evaluation(job, clock.limit, settings) if voted.groups else clock.limit
    idle_limit = limit_of_idle_phase(job, limit, settings)
    in_a_phase = voted.checkpointing or idle_limit.seconds < limit.seconds
    idle = in_a_phase and age_s >= idle_limit.seconds and nothing_at_work(job, voted)
    limit = idle_limit if idle else limit
    shortened = limit.seconds < clock.limit.seconds
    if age_s < limit.seconds:
        return finding
    busy_limit_s = max(with_a_step(job, settings.busy_limit), limit.seconds)
    if not voted.groups:
        return finding_by_gpus(job, finding, clock, loop_state(job, now, limit.seconds), busy_limit_s)
    saving = _may_be_saving(job, voted, age_s) and age_s < with_a_step(job, settings.checkpoint_floor)
    if saving or (voted.checkpointing and has_just_grown(job)):
        return finding
    unanswered = nobody_answers(job, voted) or (idle and voted.checkpointing)
    limit = limit_by_stacks(job, voted, limit, settings, unanswered=unanswered)
    everybody = all_wait(job, voted) and not clock.unread
    finding = _looking_again(finding, voted, (everybody and age_s < busy_limit_s) or unanswered or shortened, settings)
    round_and_round = spinning(job, voted, now, limit.seconds, settings.busy_limit)
    if round_and_round:
        return spinning_finding(job, finding, limit, voted, round_and_round, busy_limit_s)
    if age_s < limit.seconds:
        return finding
    seen = loop_state(job, now, limit.seconds)
    alone = standing_alone(job, voted, seen, error_window_s(job, clock, settings))
    clock = replace(clock, limit=limit)
    ended = any(each.reason.startswith(Place.TEARDOWN) for each in alone)
    if may_be_right(job, clock, alone or (*voted.outside, *voted.undumped), now, ended=ended):
        return finding
    found = finding_beyond_limit(job, finding, clock, voted, max(busy_limit_s, limit.seconds), alone)
    if everybody and found.truth is Truth.BAD:
        patient_s = max(with_a_step(job, settings.everybody_limit), limit.seconds)
        found = with_everybody(job, found, seen, patient_s)
    if (unanswered or shortened) and age_s < acted_on_after_s(job, settings, idle=idle, saves=unanswered):
        return replace(found, actionable=False)
    return found


def _may_be_saving(job: JobView, voted: Vote, age_s: float) -> bool:
    """Whether files of a checkpoint have grown since the last step, and who keeps the others waiting is in code that is
    not known: a writer of one's own, an upload, a program."""
    keeps = {each.rank for each in voted.outside}
    places = {group.place for group in voted.groups if keeps.intersection(group.ranks)}
    return has_grown_since(job, age_s) and Place.OTHER in places


def _looking_again(finding: Finding, voted: Vote, still: bool, settings: CollectiveHang) -> Finding:
    """With dumps that follow more closely where they decide: whether a rank goes round, or what is `still` stays so."""
    moves = voted.waiting and voted.outside and voted.moving and not (voted.checkpointing or voted.patient)
    if not moves and not still:
        return finding
    later_s = GOES_ROUND_EVERY * settings.busy_limit if moves else LOOK_EVERY_S
    wanted = (replace(each, later_s=later_s) if isinstance(each, StackRequest) else each for each in finding.wanted)
    return replace(finding, wanted=tuple(wanted))


def _before_the_limit(job: JobView, finding: Finding, clock: LoopClock, settings: CollectiveHang) -> Finding | None:
    """Of a job whose step is late by its own measure: BAD if its stacks prove a hang already; unknown while they are
    asked for. None: nothing but the limit judges it."""
    age_s, late_s = clock.age_s, late_after_s(job.progress)
    if late_s is None or not late_s <= age_s < clock.limit.seconds or clock.unread:
        return None
    proof = proof_of_hang(job) if age_s >= settings.proven_floor else None
    request = early_stacks(job, proof) if settings.proven_floor < settings.floor else None
    if proof is None and request is None:
        return None
    finding = replace(finding, wanted=(*finding.wanted, *([request] if request is not None else ())))
    if proof is not None:
        return proven_finding(job, finding, proof)
    return replace(finding, duration_s=0.0)  # what is only late is no suspicion that could hold anything back


SPEC = DetectorSpec(
    detect=detect,
    settings=CollectiveHang,
    severity=Severity.CRITICAL,
    blames_node=0.9,
    sentence="Ranks wait for each other",
    job_state="hangs",
    explains=(IncidentKind.MEMORY_KILL,),
    explained_by=(*STORAGE, IncidentKind.LINGERING_JOB, IncidentKind.WEDGED_TEARDOWN, IncidentKind.RANK_STOPPED),
    has_aftermath=False,
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs",),
)


# -------------------------------------------------------------------------------- loops that turn without end

SHARE = 1 / 6  # Of `busy_limit` (5 min of 30) that a rank may go round without a word.
FIRST_SHARE = 1 / 2  # The same of a rank that may well have something to do alone.
GOES_ROUND_EVERY = 1 / 30  # Of `busy_limit` (a minute): time between two dumps while someone is suspected.
LEAST_DUMPS = 5
SEEN_FOR = 0.5  # Of its time without a step so much has to lie between the first and the last of these dumps.
FRESH = 3.0  # The last of them is no older than so many times GOES_ROUND_EVERY.


def spinning(job: JobView, voted: Vote, now: float, limit_s: float, busy_limit_s: float) -> tuple[Culprit, ...]:
    """Those who stand outside and go round in a small Python loop, if all of them do and have for long enough.

    A rank that computes alone for minutes is healthy as a rule: rank 0, or the first of a node, builds an index. So all
    of this has to be seen of it: dump after dump the same few lines and nothing known to take its time on the stack
    (diagnose.stacks.spinning), nothing read or written, no byte more memory, one core, workers that do nothing, a GPU
    that idles, and a log that tells of no phase. Anything unknown clears it. It is acted on no earlier than any other
    rank that works, for a call of compiled code that keeps the interpreter's lock looks the same.

    `limit_s`: the time without a step that is normal for the job; `busy_limit_s`: as configured.
    """
    progress = job.progress
    if progress is None or progress.phase is not None or not voted.outside or not voted.waiting:
        return ()
    saves = (job.saving_age_s is not None and job.saving_age_s < limit_s) or has_just_grown(job) or job.is_writing
    if voted.missing or voted.undumped or voted.checkpointing or voted.patient or saves:
        return ()
    processes = {(rank.node, rank.process.pid): rank for rank in job.living_ranks}
    steady = {(each.node, each.pid): each for each in job.steady}
    culprits = []
    for one in voted.outside:
        key = (one.node or "", one.pid or 0)
        rank, seen = processes.get(key), steady.get(key)
        if rank is None or seen is None:
            return ()
        share = FIRST_SHARE if _has_errands(job, rank) and not is_named_waiting(seen) else SHARE
        patience_s = max(share * busy_limit_s, limit_s)
        lately = now - seen.last_at <= FRESH * GOES_ROUND_EVERY * busy_limit_s
        seen_s = seen.last_at - seen.first_at
        if progress.age_s < patience_s or seen_s < SEEN_FOR * patience_s or not lately:
            return ()
        if seen.dumps < LEAST_DUMPS or not keeps_the_lock(seen) or not _does_nothing_else(job, rank, now, seen):
            return ()
        reason = (
            f"goes round in {where(seen)}: seen there {seen.dumps} times within {duration(seen_s)}, in which it read"
        )
        reason += " and wrote nothing and held no more memory"
        culprits.append(Culprit(node=one.node, rank=one.rank, pid=one.pid, reason=reason))
    return tuple(culprits)


def _has_errands(job: JobView, rank: ProcessView) -> bool:
    """Whether this is rank 0, or the first of several on its node: who prepares, writes or computes something
    for the others."""
    number = rank.process.rank or 0
    others = [each.process.rank or 0 for each in job.ranks if each.node == rank.node and each is not rank]
    return number == 0 or (bool(others) and number < min(others))


def _does_nothing_else(job: JobView, rank: ProcessView, now: float, seen: Steady) -> bool:
    """Whether its process is known to move no data, its workers to rest, and its GPU, where the job has any,
    to idle."""
    if rank.process.cpu_ratio is None or moves_data(rank):
        return False
    workers = [
        each
        for each in job.processes
        if each.process.role is Role.WORKER and each.process.rank == rank.process.rank and each.alive
    ]
    if any(not is_quiet(each) for each in workers):
        return False
    own = [each.view for each in job.gpus if each.rank == rank.process.rank]
    if job.gpus and not own:
        return False
    return all(view.idle_since is not None and view.idle_since <= seen.first_at for view in own)


# -------------------------------------------------------------------------------- starts

MAX_NAMED = 8
MAX_WORLD = 1 << 20  # What a process says about the number of ranks is a user's word.


def not_joined(job: JobView, finding: Finding, patience_s: float) -> Finding | None:
    """`finding` as BAD, with the absent ranks, if dump after dump every rank there is waits for the others to
    join and `patience_s` have gone by without a step; None: it is not so, or not known.

    Never acted on: the others may still be started, and a restart would not start them either.
    """
    if job.progress is not None or job.run_age_s < patience_s:
        return None
    absent = absent_ranks(job)
    if not absent:
        return None
    voted = vote(job.snapshots, job.ranks)
    joining = voted.groups and all(group.place is Place.RENDEZVOUS for group in voted.groups)
    if not joining or voted.moving is not False or voted.missing or voted.undumped:
        return None
    here = {rank.node for rank in job.ranks}
    empty = [node for node in job.job.nodes if node not in here]
    where = f"; {_few(empty)} {'has' if len(empty) == 1 else 'have'} no rank at all" if empty else ""
    there = len(job.ranks)
    return finding.bad(
        f"Job {job.job.job_id} does not start: after {job.run_age_s:.0f} s {there} "
        f"{'rank waits' if there == 1 else 'ranks wait'} for the others to join, and of "
        f"{'rank' if len(absent) == 1 else 'ranks'} {_few(absent)} (of {there + len(absent)} in all) no "
        f"process has been seen{where}.",
        duration_s=job.run_age_s,
        culprits=tuple(Culprit(rank=rank, reason="no process of it has been seen") for rank in absent[:MAX_NAMED]),
    )


def absent_ranks(job: JobView) -> tuple[int, ...]:
    """The ranks that its processes say there are and of which none was seen, on nodes that all report."""
    world = max((rank.process.world_size or 0 for rank in job.ranks), default=0)
    if job.silent_nodes or world > MAX_WORLD:
        return ()
    known = {rank.process.rank for rank in job.ranks}
    return tuple(rank for rank in range(world) if rank not in known)


def _few(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return shown if len(values) <= 6 else f"{shown}, …"


STILL_SHARE = 0.5  # Of the patience with a start: dumps begin after half (analysis.progress_limit.STEPLESS_AFTER).


def not_joining(job: JobView, finding: Finding, patience_s: float) -> Finding | None:
    """`finding` as BAD, with the ranks that all others wait for to join and that are stuck before they do, once
    `patience_s` have gone by without a step, half of them in the same place; None: it is not so, or not known.

    Never acted on: what a program does before it begins is hardly known.
    """
    seen = who_never_joins(job, STILL_SHARE * patience_s) if job.run_age_s >= patience_s else None
    if seen is None:
        return None
    culprits, voted, still_s = seen
    return finding.bad(
        f"Job {job.job.job_id} does not start: no step for {job.run_age_s:.0f} s; {held_up_by(culprits, voted)} "
        f"to join, and no rank has moved for {still_s:.0f} s.",
        duration_s=job.run_age_s,
        culprits=culprits,
    )
