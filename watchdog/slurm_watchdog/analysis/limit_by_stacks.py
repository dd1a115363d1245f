"""The limit of a job whose stacks show what takes long: a checkpoint, a transfer, an evaluation, a compilation. Pure.

A transfer may take half an hour. It moves bytes, though, and the kernel counts them for each connection. So it gets
less where nobody answers: dump after dump every rank outside the collective waits in the same frames for the same
connection, on which nothing came or went; it uses no time, and reads and writes nothing. What is not known of it
speaks for it.
"""

from __future__ import annotations

from typing import Protocol

from slurm_watchdog.analysis.learned_limit import Limit, LimitSettings
from slurm_watchdog.analysis.progress_limit import with_a_step
from slurm_watchdog.analysis.rank_motion import used_nothing
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.evidence import ProcessStack

LEAST_APART_S = 15.0
"""Between the first dump and the last. A transfer that stutters moves something in so many seconds."""
RECEIVES = frozenset({"recvfrom", "recvmsg", "read", "readv", "poll", "ppoll"})
"""Calls in which a thread waits for what a connection brings; Python polls where a time-out is set."""


class LongPhases(LimitSettings, Protocol):
    @property
    def answer_limit(self) -> float: ...


def limit_by_stacks(job: JobView, voted: Vote, limit: Limit, settings: LongPhases, *, unanswered: bool) -> Limit:
    """`limit`, or a longer one where the stacks show what takes its time; `unanswered`: see `nobody_answers` and
    `hang_proof.stands_in_a_save`."""
    floor_s, reason = settings.checkpoint_floor, "the stacks show a checkpoint or a transfer"
    if unanswered:
        floor_s, reason = (
            settings.answer_limit,
            "the stacks show a checkpoint or a transfer, in which nothing is at work",
        )
    if voted.checkpointing and limit.seconds < with_a_step(job, floor_s):
        limit = Limit(seconds=with_a_step(job, floor_s), reason=reason)
    evaluation_s = with_a_step(job, settings.evaluation_floor)
    if voted.patient and limit.seconds < evaluation_s:
        return Limit(seconds=evaluation_s, reason="the stacks show an evaluation or a compilation")
    return limit


def nobody_answers(job: JobView, voted: Vote) -> bool:
    """Whether every rank that the others wait for talks to a server, and nothing comes or goes."""
    still = voted.waiting and voted.moving is False and not (voted.undumped or voted.missing)
    if not voted.checkpointing or not voted.outside or not still:
        return False
    return all(_is_unanswered(job, each.node, each.pid) for each in voted.outside)


def _is_unanswered(job: JobView, node: str | None, pid: int | None) -> bool:
    seen = [
        (dump.age_s, stack) for dump in job.snapshots for stack in dump.stacks if (stack.node, stack.pid) == (node, pid)
    ]
    if len(seen) < len(job.snapshots) or not seen:
        return False
    (first_age_s, first), (last_age_s, last) = seen[0], seen[-1]
    stacks = [stack for _, stack in seen]
    if first_age_s - last_age_s < LEAST_APART_S or not all(stack.syscall in RECEIVES for stack in stacks):
        return False
    awaited = set[str].intersection(*map(_sockets, stacks))
    return bool(awaited) and used_nothing(first, last, first_age_s - last_age_s) is True


def _sockets(stack: ProcessStack) -> set[str]:
    return {each.socket for each in stack.waits_for}
