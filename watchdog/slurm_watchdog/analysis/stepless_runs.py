"""Runs whose steps cannot be read: when their stacks are looked at, and what speaks against accusing them. Pure."""

from __future__ import annotations

from slurm_watchdog.analysis.held_processes import moves_data
from slurm_watchdog.analysis.progress_limit import ENDS, LoopClock, counts_hardly, look_apart_s, wants_stacks
from slurm_watchdog.analysis.rank_activity import loop_state
from slurm_watchdog.analysis.rank_motion import (
    did_nothing,
    is_in_training_code,
    is_serving,
    is_training,
    waits_for_others_work,
)
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Culprit, StackRequest

STEPLESS_AFTER = 0.5
"""Share of `stepless_limit` after which a run without a step is looked at: most have made some by then."""
SPACING = 0.15  # Time between two dumps as a share of the limit: three dumps between suspicion and verdict.
ALONE = 4.0
"""A process that is alone in its job is looked at so many times more rarely, until something shows that it
trains: most such jobs do something else, and a node may have a hundred of them."""


def stacks_wanted(job: JobView, clock: LoopClock, settings: PhaseLimits) -> tuple[StackRequest, ...]:
    """The stacks that the verdict needs; those of a run whose steps cannot be read are looked at all the
    time, and rarely."""
    job_id, limit_s = job.job.job_id, clock.limit.seconds
    stepless = counts_hardly(job, settings) and bool(job.ranks) and job.phase != ENDS
    rarely_s = look_apart_s(job, settings) * _rarer(job) if stepless else None
    if wants_stacks(job, clock.limit, clock.age_s):
        apart_s = min(20.0, SPACING * limit_s)
        return (StackRequest(job_id=job_id, apart_s=apart_s, later_s=rarely_s),)
    silent_s = job.run_age_s if job.progress is None else min(job.run_age_s, job.progress.age_s)
    if rarely_s is None or silent_s < STEPLESS_AFTER * settings.stepless_limit:
        return ()
    return (StackRequest(job_id=job_id, apart_s=rarely_s, later_s=rarely_s),)


def _rarer(job: JobView) -> float:
    """By what the time between two looks is longer."""
    moved = job.motion is not None and job.motion.trained > 0
    return 1.0 if len(job.ranks) > 1 or moved or is_training(job) else ALONE


def may_be_right(
    job: JobView, clock: LoopClock, named: tuple[Culprit, ...], now: float, *, ended: bool = False
) -> bool:
    """Whether something is evidence against a hang of a run whose steps cannot be read, or that has made none. `named`
    are those that would be accused. `ended`: its only rank is known to be where only a fault keeps it, which need not
    be in the code of a training.

    Whether such a loop turns, only its ranks can show. A server whose ranks wait for a request looks the same
    for days."""
    if not clock.unread and job.progress is not None:
        return False
    if is_serving(job) or not is_training(job) or (clock.unread and not ended and not is_in_training_code(job)):
        return True
    if len(job.ranks) == 1 and waits_for_others_work(job):  # a program, a task or a server may be at work
        return True
    if any(each.alive and moves_data(each) for each in job.processes):
        return True
    if job.log is not None and job.log.grew_age_s < clock.limit.seconds / 2:
        return True
    if not all(did_nothing(job, each.node, each.pid) for each in named):
        return True
    return not named and loop_state(job, now, clock.limit.seconds).stands is not True
