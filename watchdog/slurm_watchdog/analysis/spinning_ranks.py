"""Ranks stuck in a small Python loop while all others wait for them: part of `collective_hang`.

A rank that computes alone for minutes is healthy as a rule: rank 0, or the first of a node, builds an index,
computes a metric, merges a checkpoint. So all of this has to be seen of it: dump after dump the same few
lines and nothing known to take its time on the stack (slurm_watchdog.diagnose.stacks.spinning), nothing read
or written, no byte more memory, one core, workers that do nothing, a GPU that idles, and a log that tells of
no phase. Anything unknown about it clears it. It takes minutes, and three times as many for a rank that is the
first of its node among others, unless its functions are called after waiting; and it is acted on no earlier
than any other rank that works (`busy_limit`), for a call of compiled code that keeps the interpreter's lock,
and has no telling name, looks the same.
"""

from __future__ import annotations

from slurm_watchdog.analysis.held_processes import moves_data
from slurm_watchdog.analysis.progress_limit import has_just_grown
from slurm_watchdog.analysis.rank_activity import is_quiet
from slurm_watchdog.diagnose.stacks.spinning import is_named_waiting, keeps_the_lock, where
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.model.cluster_view import JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.past_runs import Steady

SHARE = 1 / 6  # Of `busy_limit` (5 min of 30) that a rank may go round without a word.
FIRST_SHARE = 1 / 2  # The same of a rank that may well have something to do alone.
GOES_ROUND_EVERY = 1 / 30  # Of `busy_limit` (a minute): time between two dumps while someone is suspected.
LEAST_DUMPS = 5
SEEN_FOR = 0.5  # Of its time without a step so much has to lie between the first and the last of these dumps.
FRESH = 3.0  # The last of them is no older than so many times GOES_ROUND_EVERY.


def spinning(job: JobView, voted: Vote, now: float, limit_s: float, busy_limit_s: float) -> tuple[Culprit, ...]:
    """Those who stand outside and go round, if all of them do and have for long enough; else no one.

    `limit_s`: the time without a step that is normal for the job; `busy_limit_s`: as configured.
    """
    progress = job.progress
    if progress is None or progress.phase is not None or not voted.outside or not voted.waiting:
        return ()
    if voted.missing or voted.undumped or voted.checkpointing or voted.patient or _saves(job, limit_s):
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
            f"goes round in {where(seen)}: seen there {seen.dumps} times within {_time(seen_s)}, in "
            "which it read and wrote nothing and "
            "held no more memory"
        )
        culprits.append(Culprit(node=one.node, rank=one.rank, pid=one.pid, reason=reason))
    return tuple(culprits)


def _saves(job: JobView, limit_s: float) -> bool:
    saved = job.saving_age_s is not None and job.saving_age_s < limit_s
    return saved or has_just_grown(job) or job.is_writing


def _has_errands(job: JobView, rank: ProcessView) -> bool:
    """Whether this is rank 0, or the first of several on its node: who prepares, writes or computes something
    for the others."""
    number = rank.process.rank or 0
    others = [each.process.rank or 0 for each in job.ranks if each.node == rank.node and each is not rank]
    return number == 0 or (bool(others) and number < min(others))


def _does_nothing_else(job: JobView, rank: ProcessView, now: float, seen: Steady) -> bool:
    """Whether its process is known to move no data, its workers to rest, and its GPU, where the job has any,
    to idle."""
    if rank.cpu_ratio is None or moves_data(rank):
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


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
