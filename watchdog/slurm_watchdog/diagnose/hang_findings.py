"""What is said of ranks that are alive and whose loop does not turn, and why: part of `collective_hang`. Pure.

Each function here takes the finding of a job, with how long no step was made, and returns it with what its stacks, or
its GPUs, show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.hang_proof import Proof
from slurm_watchdog.analysis.job_state import (
    has_trained,
    held_by,
    last_error,
    made_last_step,
    process_on_storage,
    rank_on_storage,
    with_what_holds,
)
from slurm_watchdog.analysis.memory_kills import Kills, kills_in_job, why_not
from slurm_watchdog.analysis.progress_limit import GROWS_S, Limit, LoopClock, has_grown_within, look_apart_s
from slurm_watchdog.analysis.rank_activity import LoopState, are_at_work
from slurm_watchdog.base.text import EXCERPT_CHARS, shortened
from slurm_watchdog.diagnose.culprit_words import describe, describe_all, what_they_do
from slurm_watchdog.diagnose.logs.reported_run import AttributedError, attributed_errors
from slurm_watchdog.diagnose.logs.root_cause import running
from slurm_watchdog.diagnose.stacks.places import locate, waits_for_own_thread
from slurm_watchdog.diagnose.stacks.sentences import group_words
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding
from slurm_watchdog.model.observations import Role
from slurm_watchdog.parse.training_log.text import split_prefix


# The words of a hang.
def waited_for(held: ProcessView | None, *, saves: bool) -> tuple[str, ...]:
    """Why nothing is done yet: a process that is blocked on a filesystem, or a checkpoint that is written."""
    if held is not None:
        return (_left_to_storage(held),)
    return ("files of a checkpoint grow: nothing is done before it is whole, or grows no more",) if saves else ()


def _left_to_storage(held: ProcessView) -> str:
    """Whether it is one node's filesystem, or everybody's, other nodes are still asked: no restart comes
    before the answer."""
    blocked = held.process.blocked
    if blocked is not None and blocked.mount is None:
        return f"{held.process.comm} (pid {held.process.pid}) on {held.node} {held_by(held)}: its filesystem is unknown"
    where = "" if blocked is None else f" on {blocked.mount} for {blocked.seconds:.0f} s"
    return f"{held.process.comm} on {held.node} has been blocked{where}: what is done about it filesystem_stall says"


def phase_fact(job: JobView) -> str:
    """The phase that the logs announce, with the line that does; and since when."""
    said = job.announced
    if said is None:
        return "phase: training, no line of the log since the last step announces anything else"
    return f"phase: {said.phase} for {said.age_s:.0f} s, announced in {said.source}: {shortened(said.line, 200)}"


def facts_of(job: JobView, voted: Vote) -> tuple[str, ...]:
    """Which phase is believed, and where every rank is."""
    facts = [phase_fact(job)]
    facts += [f"{group_words(group, nodes=True)}, {' < '.join(group.frames[:4])}" for group in voted.groups[:8]]
    facts += [f"{describe(c)} {c.reason}" for c in voted.undumped[:8]]
    facts += [
        f"{p.node} rank {p.process.rank}: state {p.process.state}" for p in job.ranks if p.process.state in "DTt"
    ][:8]
    return tuple(facts)


def ranks_wait(number: int) -> str:
    """`3 ranks wait`."""
    return "1 rank waits" if number == 1 else f"{number} ranks wait"


def held_up_by(culprits: tuple[Culprit, ...], voted: Vote) -> str:
    """Who does what, and how many wait for that."""
    return f"{what_they_do(culprits)}, {ranks_wait(voted.waiting)} for {'them' if len(culprits) > 1 else 'it'}"


FAULTS_OF_ONE = frozenset({Place.DATALOADER, Place.LOCK, Place.GIL})
"""Where a rank that has no peers to wait for stays because of a fault, as in a queue of its own threads: others (a
download, a queue that other processes fill, sleep) are waits like any other. One that is shutting down does so, too, if
it said before that it raised an exception: a thread keeps it from its end."""


def proven_finding(job: JobView, finding: Finding, proof: Proof) -> Finding:
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


def spinning_finding(
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


def standing_alone(job: JobView, voted: Vote, seen: LoopState, window_s: float) -> tuple[Culprit, ...]:
    """The only rank of a job, if dump after dump it stands where nothing but a fault keeps one for so long,
    and neither it nor its workers nor its GPU do anything. No one else can tell that it is waited for.
    `window_s`: see `error_window_s`."""
    still = voted.moving is False and not voted.checkpointing and seen.stands
    if len(job.ranks) != 1 or (job.ranks[0].process.world_size or 1) > 1 or not still or len(voted.groups) != 1:
        return ()
    group, rank = voted.groups[0], job.ranks[0]
    reason = f"{group.place}, in {group.frames[0]}"
    culprit = rank.culprit(reason)
    own = (each for each in job.errors if each.event.rank in (rank.process.rank, None))
    raised = group.place is Place.TEARDOWN and any(each.age_s <= window_s for each in own)
    own_queue = any(waits_for_own_thread(locate(each)) for each in job.snapshots[-1].stacks if each.rank is not None)
    fault = (group.place in FAULTS_OF_ONE or own_queue) and not voted.in_own_code
    return (culprit,) if raised or fault else ()


def finding_by_gpus(job: JobView, finding: Finding, clock: LoopClock, seen: LoopState, busy_limit_s: float) -> Finding:
    """No stack of any rank: BAD if the GPUs show that most ranks wait. To be acted on much later, and only
    with a culprit: an upload that uses no time and no file looks like a rank that idles."""
    age_s, limit, progress = finding.duration_s, clock.limit, job.progress
    # An error of which is not known what it says may be the end of a training.
    unknown = any(each.event.pattern is None and each.age_s <= age_s for each in job.errors)
    stuck, failed = rank_on_storage(job), unknown or last_error(job) is not None
    if not seen.stands or not seen.in_collective or progress is None or stuck or failed:
        return finding
    named = what_they_do(seen.culprits) if seen.culprits else "no rank is identified"
    return finding.bad(
        f"Job {job.job.job_id} hangs after {progress.place}: no step for {age_s:.0f} s "
        f"(limit {limit.seconds:.0f} s, {limit.reason}); {seen.why}; {named}.",
        culprits=seen.culprits,
        facts=("no stacks of its ranks: their GPUs and processes show that they wait",),
        actionable=bool(seen.culprits) and bool(job.gpus) and age_s >= busy_limit_s,
    )


def finding_beyond_limit(
    job: JobView,
    finding: Finding,
    clock: LoopClock,
    voted: Vote,
    busy_limit_s: float,
    alone: tuple[Culprit, ...] = (),
) -> Finding:
    """Beyond the limit: BAD if the stacks do not move while ranks wait in a collective. Otherwise it is no hang
    that is known: `stalled_progress` tells of it much later.

    To be acted on if someone is outside that collective. All ranks in it, or too many outside, may be a network
    that is down, or a log that is not written while the job continues: only time distinguishes the two.
    """
    age_s, limit = finding.duration_s, clock.limit
    stuck = voted.moving is False and (voted.waiting > 0 or bool(alone)) and not voted.missing
    culprits = alone or ((*voted.outside, *voted.undumped) if stuck else ())
    if not stuck or are_at_work(job, culprits):
        return finding
    progress, culprits = job.progress, with_what_holds(job, culprits)
    if progress is None and not culprits and not clock.unread:
        return finding
    finished = made_last_step(job)
    last = "after it had trained" if clock.unread else "before its first step"
    if progress:
        last = f"after {'its last step, ' + str(progress.step) if finished else progress.place}"
    if alone:
        named = f"{what_they_do(culprits)}, and does nothing"
    elif culprits:
        named = held_up_by(culprits, voted)
    elif voted.elsewhere:
        named = f"{ranks_wait(voted.waiting)} in a collective and {voted.elsewhere} not, so no rank is identified"
    else:
        named = f"all {voted.waiting} ranks wait in a collective and none is outside it, so no rank is identified"
    held = process_on_storage(job)
    saves = has_grown_within(job, GROWS_S) and age_s < busy_limit_s
    return finding.bad(
        f"Job {job.job.job_id} hangs {last}: {clock.words} (limit {limit.seconds:.0f} s, {limit.reason}); {named}.",
        culprits=culprits,
        facts=(*facts_of(job, voted), *waited_for(held, saves=saves)),
        actionable=(progress is not None or has_trained(job) or clock.unread)
        and not finished
        and held is None
        and not saves
        and (bool(culprits) or (age_s >= busy_limit_s and not clock.unread)),
    )


def error_window_s(job: JobView, clock: LoopClock, settings: PhaseLimits) -> float:
    """How old an error may be that tells why the loop has stopped: since the last step, or, where steps
    cannot be read, since the last look that found it moving."""
    progress = job.progress
    if clock.unread:
        return clock.age_s + look_apart_s(job, settings, moving=True)
    if progress is None:
        return job.run_age_s
    return min(progress.age_s, progress.last_increase_age_s or progress.age_s)


OF_DATA = frozenset(
    {"io_error", "stale_file_handle", "read_only", "disk_full", "quota", "too_many_files", "process_limit",
     "shared_memory", "bus_error", "dataloader_worker", "oom_kill", "host_oom"}
)  # fmt: skip
"""Rows of log_signatures: what keeps data from a rank, whichever rank reports it."""
NO_CAUSE = frozenset({"network", "terminated", "interrupted"})
"""A server that does not answer is tried again; a process that was ended was ended by someone."""
INSIDE = (Place.QUEUE, Place.DATALOADER, Place.LOCK, Place.SLEEP, Place.SUBPROCESS, Place.TEARDOWN)
"""Waits inside of a process, of which another thread or process of it may be the reason."""
THREAD = "Exception in thread "
SAME_TRACE_S = 2.0  # The lines of one traceback are read within this time.
QUEUED_STEPS = 16
"""Batches that a queue still has when its reader dies: torch's data loader prefetches 2 for each of up to 8 workers."""
QUEUED_S = (10.0, 300.0)  # The same in time, at least and at most.


def with_kill(job: JobView, found: Finding, kills: Kills, now: float) -> Finding | None:
    """A hang with the process of the job, no rank, that the kernel has killed for memory since the last step; None:
    there is none. A rank that was killed is gone, and no matter of a hang."""
    killed = [
        each
        for each in kills_in_job(kills, job, now)
        if each.role not in (None, Role.RANK) and not why_not(each, job, now)
    ]
    if not killed:
        return None
    first = killed[0]
    who = describe_all([each.culprit for each in killed])
    text = f"{who[0].upper()}{who[1:]} was {first.words}, {now - first.at:.0f} s ago"
    return replace(found, summary=f"{found.summary.rstrip('.')}. {text}.", facts=(*found.facts, *first.lines))


def with_logged_cause(job: JobView, found: Finding, now: float, within_s: float) -> Finding:
    """A hang with the error that stopped its rank, if the log has one that is no older than `within_s`, or stopped it
    some steps earlier."""
    cause = logged_cause(job, found.culprits, now, within_s)
    if cause is None:
        return found
    text = shortened(split_prefix(cause.error.line)[0], EXCERPT_CHARS).rstrip(".:")
    where = "Its log says why" if cause.rank is not None else "The job's log says why, in a line that names no rank"
    ago = f"logged {now - cause.error.at:.0f} s ago: {cause.error.line}"
    return replace(found, summary=f"{found.summary.rstrip('.')}. {where}: {text}.", facts=(*found.facts, ago))


def logged_cause(job: JobView, culprits: Sequence[Culprit], now: float, within_s: float) -> AttributedError | None:
    """The line that says why these ranks are where they are; None: none is known. Its `rank` is one of theirs, or
    None where the line does not tell whose it is."""
    if not culprits or not job.errors:
        return None
    found = list(_candidates(job, culprits, now, within_s))
    headers = log_table().headers
    return max(found, key=lambda each: (each.error.pattern not in headers, each.error.at), default=None)


def _candidates(job: JobView, culprits: Sequence[Culprit], now: float, within_s: float) -> Iterator[AttributedError]:
    table, ranks = log_table(), {each.rank for each in culprits}
    inside = all(each.reason.startswith(INSIDE) for each in culprits)
    step_s = 0.0 if job.progress is None else job.progress.step_s or 0.0
    before_s = min(QUEUED_S[1], max(QUEUED_S[0], QUEUED_STEPS * step_s)) if inside else 0.0
    events = [each.event for each in sorted(job.errors, key=lambda each: now - each.age_s)]
    said = zip(events, attributed_errors(running(job, now)), strict=True)
    errors = [each if event.rank is None else replace(each, rank=event.rank) for event, each in said]
    threads = [each for each in errors if THREAD in each.error.line]
    for each in errors:
        name, age_s = each.error.pattern, now - each.error.at
        if not name or name in table.consequences | table.from_outside | NO_CAUSE or age_s > within_s + before_s:
            continue
        rank = job.ranks[0].process.rank if each.rank is None and len(job.ranks) == 1 else each.rank
        of_data = name in OF_DATA or (
            name not in table.headers and any(_is_one_trace(each, thread) for thread in threads)
        )
        if age_s > within_s and not of_data:
            continue
        if rank in ranks and rank is not None:
            yield replace(each, rank=rank)
        elif rank is None and inside and of_data and each.node in {None, *(c.node for c in culprits)}:
            yield each


def _is_one_trace(error: AttributedError, thread: AttributedError) -> bool:
    same = error.error.source == thread.error.source and error.rank in (thread.rank, None)
    return same and 0.0 <= error.error.at - thread.error.at <= SAME_TRACE_S
