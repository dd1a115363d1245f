"""The limit of a job whose stacks show what takes long: a checkpoint, a transfer, an evaluation, a compilation. Pure.

A transfer may take half an hour. It moves bytes, though, and the kernel counts them for each connection. So it gets
less where no one answers: dump after dump every rank outside the collective waits in the same frames for the same
connection, on which nothing came or went; it uses no time, and reads and writes nothing. What is not known of it
speaks for it.

A log that announces an evaluation or a checkpoint asks for patience likewise, and gets less where the stacks show that
nothing is at work in it.
"""

from __future__ import annotations

from slurm_watchdog.analysis.learned_limit import Limit
from slurm_watchdog.analysis.progress_limit import with_a_step
from slurm_watchdog.analysis.rank_motion import used_nothing
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.cluster_view import JobView

LEAST_APART_S = 15.0
"""Between the first dump and the last. A transfer that stutters moves something in so many seconds."""
EVALUATES, SAVES = "evaluating", "checkpointing"  # Phases that a log announces.
KNOWN_PHASES = 3  # So many evaluations of a run tell how long the next one takes.
RECEIVES = frozenset({"recvfrom", "recvmsg", "read", "readv", "poll", "ppoll"})
"""Calls in which a thread waits for what a connection brings; Python polls where a time-out is set."""


def limit_by_stacks(job: JobView, voted: Vote, limit: Limit, settings: PhaseLimits, *, unanswered: bool) -> Limit:
    """`limit`, or a longer one where the stacks show what takes its time; `unanswered`: see `nobody_answers` and
    `hang_proof.nothing_at_work`."""
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


def limit_of_known_evaluation(job: JobView, limit: Limit, settings: PhaseLimits) -> Limit:
    """`limit`, or a shorter one for an evaluation that the log announces, once three of this run have shown how long
    they take. Never below `answer_limit`: an evaluation of all the data, after some of a part, may be at work."""
    return _shorter(limit, *_known_evaluation(job, settings, with_a_step(job, settings.answer_limit)))


def limit_of_idle_phase(job: JobView, limit: Limit, settings: PhaseLimits) -> Limit:
    """`limit`, or a shorter one for an evaluation or a checkpoint that the log announces: to be used only where the
    stacks show that nothing is at work (`hang_proof.nothing_at_work`)."""
    progress = job.progress
    if progress is None or progress.phase not in (EVALUATES, SAVES) or progress.steps_seen < settings.warmup_steps:
        return limit
    reason = f"the log says {progress.phase}, and nothing is at work"
    idle = Limit(seconds=with_a_step(job, settings.answer_limit), reason=reason)
    return _shorter(limit, idle, *_known_evaluation(job, settings, settings.floor))


def _known_evaluation(job: JobView, settings: PhaseLimits, least_s: float) -> tuple[Limit, ...]:
    """What this run's own evaluations say of the next one; none before KNOWN_PHASES of them."""
    progress = job.progress
    if progress is None or progress.phase != EVALUATES or len(progress.phase_intervals_s) < KNOWN_PHASES:
        return ()
    own_s = progress.phase_intervals_s
    reason = f"{settings.factor:g} x the longest of {len(own_s)} evaluations, {max(own_s):.0f} s"
    return (Limit(seconds=max(least_s, settings.factor * max(own_s)), reason=reason),)


def _shorter(*limits: Limit) -> Limit:
    """The first of the shortest ones."""
    return min(limits, key=lambda each: each.seconds)


def acted_on_after_s(job: JobView, settings: PhaseLimits, *, idle: bool, saves: bool) -> float:
    """So long without a step before anything is done where a shorter limit has applied. `saves`: the stacks show a
    checkpoint, or a server that does not answer: it may be written where no one looks. `idle`: nothing is at work, and
    an evaluation whose ranks stand where they stood does not come back. Else it is only late: see `evaluation_floor`.
    """
    if saves or (job.progress is not None and job.progress.phase == SAVES):
        return with_a_step(job, settings.checkpoint_floor)
    return with_a_step(job, settings.answer_limit if idle else settings.evaluation_floor)


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
    awaited = set[str].intersection(*({each.socket for each in stack.waits_for} for stack in stacks))
    return bool(awaited) and used_nothing(first, last, first_age_s - last_age_s) is True
