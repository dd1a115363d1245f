"""`collective_hang`: every rank is alive and the training loop makes no step. Stacks show which rank keeps the
others waiting.

Where there are none (a trace, an agent without py-spy), GPUs that spin, or that are busy while few others idle, show
that they wait. A rank that computes may be right; one that loops over a few lines: see `analysis/spinning_ranks.py`.

Fires: every rank is alive and no step was made for longer than the job's own limit: 3 × its slowest recent
step, at least 60 s; at least 30 min while the log says that it evaluates or saves, or a stack shows a
checkpoint or an upload (5 min, `answer_limit`, if it waits for a server that sends nothing, or in a lock of its own
with nothing at work that could write), or an evaluation or a compilation that is not stuck; 1 h until 5 steps were
seen, and after a launcher has started all ranks again. A run without a step is reported after 10 min
(`stepless_limit`) if all ranks but a few wait for others to join, and dumps over 5 min show these stuck inside of
their own process, with nothing at work: see `who_never_joins`. From half the limit on, stacks of all ranks are taken,
several times. Before that limit, from 10 s (`proven_floor`) on, if the hang is proven. Once 50 steps were read, a step
is late when it takes longer than each of the last hundred; stacks are then taken every 2 s (24 of an hour). Three of
them have to show every rank where it was, all but a few in one collective, and the others waiting inside of their own
process, for a lock, a queue or their data loader, with nothing at work: see `analysis/hang_proof.py`.
Names: ranks *outside* the collective in which the others wait, and ranks that cannot be dumped, but none
that moves data, also on the connection that it waits for, or whose workers compute. If all ranks wait in one
collective, the few whose GPUs do nothing while the others' spin; else none, and links of their nodes that are down
are said. Dumps of PyTorch's Flight Recorder since the last step name who has not entered the others' collective; they
and NCCL's RAS clear who is shown waiting.
Acts: restarts the job, if the stacks do not move, no process of the job is blocked on a filesystem and no files of a
checkpoint grow (until `busy_limit`); a hang that is proven before the limit after a second look, of five dumps within
11 s. If all ranks are in one collective it alerts at once and acts after 2 min (`everybody_limit`), if it is known of
every rank that it does nothing else, and no link is down; otherwise after 30 min (`busy_limit`), for the network may
come back. Without any stacks, GPUs that spin, beside few that idle, show the same; acted on after `busy_limit`, and
only with a rank named.
Note: a rank that computes while the others wait gets `busy_limit`. One case is reported earlier (never acted on
earlier): a rank that loops over a few lines of Python without end. It is reported after a sixth of `busy_limit` (5
min), after half of it (15 min) if it is the first rank of its node, when at least five dumps a minute apart show the
same few lines with the interpreter's lock and no function that is known to work for long, it reads and writes nothing,
its memory does not change, its workers rest and its GPU idles. Any of these that is not known clears it.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.hang_proof import Proof, early_stacks, proof_of_hang, stands_in_a_save
from slurm_watchdog.analysis.held_processes import process_on_storage, rank_on_storage, with_what_holds
from slurm_watchdog.analysis.job_state import has_ended, has_trained, last_error
from slurm_watchdog.analysis.lateness import late_after_s
from slurm_watchdog.analysis.learned_limit import Limit
from slurm_watchdog.analysis.limit_by_stacks import limit_by_stacks, nobody_answers
from slurm_watchdog.analysis.progress_limit import (
    GROWS_S,
    LoopClock,
    has_just_grown,
    look_apart_s,
    loop_clock,
    makes_steps,
    wants_stacks,
    with_a_step,
)
from slurm_watchdog.analysis.rank_activity import LoopState, loop_state, working_process
from slurm_watchdog.analysis.rendezvous import not_joined
from slurm_watchdog.analysis.spinning_ranks import GOES_ROUND_EVERY, spinning
from slurm_watchdog.analysis.stepless_runs import objection_to_hang, stacks_wanted
from slurm_watchdog.base.shortened import EXCERPT_CHARS, shortened
from slurm_watchdog.detect.spec import STORAGE, DetectorSpec, Subject, option, span, span_or_never
from slurm_watchdog.diagnose.culprit_words import what_they_do
from slurm_watchdog.diagnose.everybody_waits import LOOK_EVERY_S, all_wait, with_everybody
from slurm_watchdog.diagnose.hang_words import facts_of, held_up_by, ranks_wait, waited_for, why_not
from slurm_watchdog.diagnose.never_joins import not_joining
from slurm_watchdog.diagnose.recorded_collectives import with_other_sources
from slurm_watchdog.diagnose.stacks.vote import Vote, vote
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity, StackRequest, Truth
from slurm_watchdog.parse.training_log.text import split_prefix

FAULTS_OF_ONE = frozenset({Place.DATALOADER, Place.LOCK, Place.GIL})
"""Where a rank that has no peers to wait for stays because of a fault: others (a download, a queue, sleep)
are waits like any other. One that is shutting down does so, too, if it said before that it raised an
exception: a thread keeps it from its end."""


@dataclass(frozen=True, kw_only=True)
class CollectiveHang:
    """Ranks are alive, the training loop does not turn."""

    floor: float = span(60.0, "No job counts as hanging sooner than this after its last step.")
    proven_floor: float = span(
        10.0,
        "The same of a hang that is proven: several dumps show where every rank stands, and that nothing is at work "
        "that the rank which the others wait for could wait for. As long as `floor`: never sooner than that.",
    )
    factor: float = option(3.0, "Limit = this x the slowest of the recent steps, never below `floor`.", ge=1.5)
    ceiling: float = span_or_never(
        0.0,
        "While a job trains no limit is longer than this, nor shorter than twice its slowest recent step; 0s = as long "
        "as is learnt.",
    )
    startup_grace: float = span(3600.0, "Limit until enough steps of this run were seen.")
    warmup_steps: int = option(5, "Steps of a run to see before its own speed counts.", ge=0)
    evaluation_floor: float = span(1800.0, "Floor while the log says that an evaluation runs.")
    checkpoint_floor: float = span(
        1800.0,
        "Floor while the log says that a checkpoint is written, or stacks show that one is written, read or uploaded.",
    )
    stepless_limit: float = span(
        600.0,
        "Limit for a run whose steps cannot be read: time that no rank has moved in its stacks, or 3 x "
        "(`factor`) its longest pause.",
    )
    answer_limit: float = span(
        300.0,
        "Limit where the rank that the others wait for has asked a server that sends nothing: no byte on its "
        "connection; or saves, and stands in a lock of its own while nothing works that could write. Proxies and "
        "load balancers give up sooner (nginx and AWS ALB after 60 s, Azure's after 240 s). "
        "Acted on after `checkpoint_floor`.",
    )
    busy_limit: float = span(
        1800.0,
        "Limit while stacks move or a rank outside the collective computes, and where no stack can be read. "
        "Ranks that all wait in one collective are reported at once, and acted on only after this time, or after "
        "`everybody_limit`.",
    )
    everybody_limit: float = span(
        120.0,
        "A job that trains and whose ranks all wait in one collective is acted on after this time, where it is known "
        "of each that it does nothing else, and no link of their nodes is down.",
    )


def detect(view: ClusterView, settings: CollectiveHang) -> list[Finding]:
    """One finding for each running job."""
    return [
        with_other_sources(
            job, hang_finding(job, view.now, settings), view.nodes, with_a_step(job, settings.busy_limit)
        )
        for job in view.jobs
    ]


def hang_finding(job: JobView, now: float, settings: CollectiveHang) -> Finding:
    """What is to be said about one job."""
    clock = loop_clock(job, now, settings)
    limit, age_s = clock.limit, clock.age_s
    finding = SPEC.about_job(job.job.job_id)
    unjudged = _why_unjudged(job)
    if unjudged:
        return finding.unknown(unjudged)
    ranks = job.ranks
    wanted = stacks_wanted(job, clock, settings)
    finding = replace(finding, wanted=wanted, duration_s=age_s)
    absent = not_joined(job, finding, settings.stepless_limit)
    if absent is None and age_s < limit.seconds:
        absent = not_joining(job, finding, settings.stepless_limit)
    if absent is not None:
        return replace(absent, facts=facts_of(job, vote(job.snapshots, ranks)))
    early = _before_the_limit(job, finding, clock, settings)
    if early is not None:
        return early
    if age_s < limit.seconds and makes_steps(job, settings) and not wants_stacks(job, limit, age_s):
        return finding.ok(f"job {job.job.job_id} makes progress")
    if age_s < limit.seconds and not wanted:
        return finding.unknown(f"no new step of job {job.job.job_id} has been seen yet")
    if age_s < limit.seconds:
        return finding.unknown(f"{clock.words}, limit {limit.seconds:.0f} s ({limit.reason})")
    voted = vote(job.snapshots, ranks)
    busy_limit_s = max(with_a_step(job, settings.busy_limit), limit.seconds)
    if not voted.groups:
        return _finding_by_gpus(job, finding, clock, loop_state(job, now, limit.seconds), busy_limit_s)
    if voted.checkpointing and has_just_grown(job, limit.seconds):
        return finding.unknown(f"{clock.words}; the files of a checkpoint grow")
    unanswered = nobody_answers(job, voted) or stands_in_a_save(job, voted)
    limit = limit_by_stacks(job, voted, limit, settings, unanswered=unanswered)
    everybody = all_wait(job, voted) and not clock.unread
    finding = _looking_again(finding, voted, (everybody and age_s < busy_limit_s) or unanswered, settings)
    round_and_round = spinning(job, voted, now, limit.seconds, settings.busy_limit)
    if round_and_round:
        return _spinning_finding(job, finding, limit, voted, round_and_round, busy_limit_s)
    window_s = error_window_s(job, clock, settings)
    alone = _alone(job, voted, loop_state(job, now, limit.seconds), window_s)
    clock = replace(clock, limit=limit)
    objection = objection_to_hang(
        job,
        clock,
        alone or (*voted.outside, *voted.undumped),
        now,
        ended=any(each.reason.startswith(Place.TEARDOWN) for each in alone),
    )
    if objection and age_s >= limit.seconds:
        return finding.unknown(f"{clock.words}, and {objection}")
    found = _bad_finding(job, finding, clock, voted, max(busy_limit_s, limit.seconds), window_s, alone)
    if unanswered and age_s < with_a_step(job, settings.checkpoint_floor):
        found = replace(found, actionable=False)
    if not everybody or found.truth is not Truth.BAD:
        return found
    patient_s = max(with_a_step(job, settings.everybody_limit), limit.seconds)
    return with_everybody(job, found, loop_state(job, now, limit.seconds), patient_s)


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
        return _proven_finding(job, finding, proof)
    # What is only late is no suspicion that could hold anything else back.
    return replace(finding, duration_s=0.0).unknown(f"{clock.words}; late after {late_s:.1f} s by its own measure")


def _proven_finding(job: JobView, finding: Finding, proof: Proof) -> Finding:
    """BAD before the limit; to be acted on once a second look has shown the same."""
    place = job.progress.place if job.progress else "its start"
    culprits = with_what_holds(job, proof.culprits)
    return finding.bad(
        f"Job {job.job.job_id} hangs after {place}: no step for {finding.duration_s:.0f} s (late after "
        f"{proof.late_s:.1f} s; {proof.dumps} dumps within {proof.span_s:.0f} s show the same, and nothing at work); "
        f"{held_up_by(culprits, proof.voted)}.",
        culprits=culprits,
        facts=facts_of(job, proof.voted),
        actionable=proof.is_confirmed,
    )


def _why_unjudged(job: JobView) -> str:
    """Why nothing can be said of this job, whatever its clock shows; empty: it can."""
    job_id, ranks = job.job.job_id, job.ranks
    if job.job.state != "RUNNING":
        return f"job {job_id} is {job.job.state}"
    if not ranks:
        return f"no ranks of job {job_id} are known"
    if job.silent_nodes:
        return f"no report from {', '.join(job.silent_nodes)}"
    if not all(rank.alive for rank in ranks):
        return f"a rank of job {job_id} is gone"
    return f"job {job_id} has made its last step" if has_ended(job) else ""


def _spinning_finding(
    job: JobView,
    finding: Finding,
    limit: Limit,
    voted: Vote,
    culprits: tuple[Culprit, ...],
    busy_limit_s: float,
) -> Finding:
    """BAD, of ranks that go round in a small loop of Python while the others wait for them. Acted on as late
    as before: it may be work that shows nothing of itself."""
    age_s = finding.duration_s
    place = job.progress.place if job.progress else "its start"
    return finding.bad(
        f"Job {job.job.job_id} hangs after {place}: no step for {age_s:.0f} s (limit "
        f"{limit.seconds:.0f} s, {limit.reason}); "
        f"{held_up_by(culprits, voted)}.",
        culprits=culprits,
        facts=facts_of(job, voted),
        actionable=age_s >= busy_limit_s,
    )


def _alone(job: JobView, voted: Vote, seen: LoopState, window_s: float) -> tuple[Culprit, ...]:
    """The only rank of a job, if dump after dump it stands where nothing but a fault keeps one for so long,
    and neither it nor its workers nor its GPU do anything. Nobody else can tell that it is waited for.
    `window_s`: see `_logged_error`."""
    still = voted.moving is False and not voted.checkpointing and seen.stands
    if len(job.ranks) != 1 or (job.ranks[0].process.world_size or 1) > 1 or not still or len(voted.groups) != 1:
        return ()
    group, rank = voted.groups[0], job.ranks[0]
    reason = f"{group.place}, in {group.frames[0]}"
    culprit = rank.culprit(reason)
    raised = group.place is Place.TEARDOWN and bool(_logged_error(job, (culprit,), window_s))
    return (culprit,) if raised or (group.place in FAULTS_OF_ONE and not voted.in_own_code) else ()


def _finding_by_gpus(job: JobView, finding: Finding, clock: LoopClock, seen: LoopState, busy_limit_s: float) -> Finding:
    """No stack of any rank: BAD if the GPUs show that most ranks wait. To be acted on much later, and only
    with a culprit: an upload that uses no time and no file looks like a rank that idles."""
    age_s, limit, progress = finding.duration_s, clock.limit, job.progress
    # An error of which is not known what it says may be the end of a training.
    unknown = any(each.event.pattern is None and each.age_s <= age_s for each in job.errors)
    stuck, failed = rank_on_storage(job), unknown or last_error(job) is not None
    if not seen.stands or not seen.in_collective or progress is None or stuck or failed:
        why = seen.why
        if stuck or failed:
            why = "an error was logged since" if failed else "a rank is blocked on a filesystem"
        return finding.unknown(f"{clock.words}, the stacks are not in, and {why}")
    named = "nobody is named"
    if seen.culprits:
        named = what_they_do(seen.culprits)
    return finding.bad(
        f"Job {job.job.job_id} hangs after {progress.place}: no step for {age_s:.0f} s "
        f"(limit {limit.seconds:.0f} s, {limit.reason}); {seen.why}; {named}.",
        culprits=seen.culprits,
        facts=("there are no stacks of its ranks: their GPUs and processes tell that they wait",),
        actionable=bool(seen.culprits) and bool(job.gpus) and age_s >= busy_limit_s,
    )


def _bad_finding(
    job: JobView,
    finding: Finding,
    clock: LoopClock,
    voted: Vote,
    busy_limit_s: float,
    window_s: float,
    alone: tuple[Culprit, ...] = (),
) -> Finding:
    """Beyond the limit: BAD if the stacks do not move while ranks wait in a collective. Otherwise it is no hang
    that is known: `stalled_progress` tells of it much later.

    To be acted on if somebody is outside that collective. All ranks in it, or too many outside, may be a network
    that is down, or a log that is not written while the job continues: only time distinguishes the two.
    """
    age_s, limit = finding.duration_s, clock.limit
    stuck = voted.moving is False and (voted.waiting > 0 or bool(alone)) and not voted.missing
    culprits = alone or ((*voted.outside, *voted.undumped) if stuck else ())
    if age_s < limit.seconds or not stuck:
        return finding.unknown(f"{clock.words}, limit {limit.seconds:.0f} s ({limit.reason}), and {why_not(voted)}")
    working = working_process(job, culprits)
    if working is not None:
        process, what = working
        return finding.unknown(
            f"{clock.words}; {process.process.comm} of rank {process.process.rank} on {process.node} {what}: "
            "who waits for it waits for work"
        )
    progress, culprits = job.progress, with_what_holds(job, culprits)
    if progress is None and not culprits and not clock.unread:
        return finding.unknown(f"job {job.job.job_id} has never logged a step that could be read")
    finished = progress is not None and progress.total_steps is not None and progress.step >= progress.total_steps
    last = "after it had trained" if clock.unread else "before its first step"
    if progress:
        last = f"after {'its last step, ' + str(progress.step) if finished else progress.place}"
    if alone:
        named = f"{what_they_do(culprits)}, and does nothing"
    elif culprits:
        named = held_up_by(culprits, voted)
    elif voted.elsewhere:
        named = f"{ranks_wait(voted.waiting)} in a collective and {voted.elsewhere} not, so nobody is named"
    else:
        named = f"all {voted.waiting} ranks wait in a collective and none is outside it, so nobody is named"
    error = _logged_error(job, culprits, window_s)
    held = process_on_storage(job)
    saves = has_just_grown(job, GROWS_S) and age_s < busy_limit_s
    return finding.bad(
        f"Job {job.job.job_id} hangs {last}: {clock.words} "
        f"(limit {limit.seconds:.0f} s, {limit.reason}); {named}{f'. It said before: {error}' if error else ''}.",
        culprits=culprits,
        facts=(*facts_of(job, voted), *waited_for(held, saves=saves)),
        actionable=(progress is not None or has_trained(job) or clock.unread)
        and not finished
        and held is None
        and not saves
        and (bool(culprits) or (age_s >= busy_limit_s and not clock.unread)),
    )


def error_window_s(job: JobView, clock: LoopClock, settings: CollectiveHang) -> float:
    """How old an error may be that tells why the loop has stopped: since the last step, or, where steps
    cannot be read, since the last look that found it moving."""
    progress = job.progress
    if clock.unread:
        return clock.age_s + look_apart_s(job, settings, moving=True)
    if progress is None:
        return job.run_age_s
    return min(progress.age_s, progress.last_increase_age_s or progress.age_s)


def _logged_error(job: JobView, culprits: tuple[Culprit, ...], within_s: float) -> str:
    """The error that the one culprit's own rank has logged within so many seconds: why it is where it is.
    Empty: none is known."""
    if len(culprits) != 1 or culprits[0].rank is None:
        return ""
    sole = len(job.ranks) == 1  # a line that names no rank is its own
    own = [
        each
        for each in job.errors
        if (each.event.rank == culprits[0].rank or (sole and each.event.rank is None)) and each.age_s <= within_s
    ]
    last = min(own, key=lambda each: (each.event.pattern == "traceback", each.age_s), default=None)
    return "" if last is None else shortened(split_prefix(last.event.line)[0], EXCERPT_CHARS).rstrip(".:")


SPEC = DetectorSpec(
    kind=IncidentKind.COLLECTIVE_HANG,
    detect=detect,
    settings=CollectiveHang,
    subject=Subject.JOB,
    severity=Severity.CRITICAL,
    blames_node=0.9,
    sentence="Ranks wait for each other",
    job_state="hangs",
    explained_by=(
        *STORAGE,
        IncidentKind.LINGERING_JOB,
        IncidentKind.WEDGED_TEARDOWN,
        IncidentKind.RANK_STOPPED,
    ),
    has_aftermath=False,
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs",),
)
