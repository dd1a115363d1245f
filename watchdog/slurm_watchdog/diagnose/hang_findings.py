"""What is said of ranks that are alive and whose loop does not turn, and why: part of `collective_hang`. Pure.

Each function here takes the finding of a job, with how long no step was made, and returns it with what its stacks, or
its GPUs, show.
"""

from __future__ import annotations

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
from slurm_watchdog.analysis.progress_limit import GROWS_S, Limit, LoopClock, has_grown_within, look_apart_s
from slurm_watchdog.analysis.rank_activity import LoopState, are_at_work
from slurm_watchdog.base.text import shortened
from slurm_watchdog.diagnose.culprit_words import describe, what_they_do
from slurm_watchdog.diagnose.stacks.places import locate, waits_for_own_thread
from slurm_watchdog.diagnose.stacks.sentences import group_words
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding


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
