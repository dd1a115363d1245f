"""How long a job may stay on one step: learnt from the job itself, wider where its phase asks for it.

The time-out of collectives, where it is known, works in two ways. When it runs out, the ranks abort, and the
stacks are lost: so stacks are collected before, in every phase, also where a limit is far away; that accuses
no one. And where a job trains and its pace is known, no limit is longer than most of a time-out that the
job's own command line or environment names; never shorter than the floor, nor than twice its slowest step. An
evaluation or a checkpoint keeps its floor: ranks that work for long are in no collective that could time out,
and for those that wait for rank 0 the program has another time-out, which no one can see.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.analysis.learned_limit import Limit, learnt_limit
from slurm_watchdog.analysis.rank_motion import is_proven, still_s
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.cluster_view import JobView

DATES_S = 2.0  # Dates of a look and of a file are so exact.
GROWS_S = 20.0  # Agents look every 5 s at a checkpoint that is being written.
SAVED_LATELY_S = 60.0  # A checkpoint that was seen to grow so lately may still be written: agents look every 30 s.
STACKS_FROM_SHARE = 0.5
"""From this share of the limit on, stacks are collected: the verdict is ready when the limit is reached."""
TIMEOUT_STACKS_FROM_SHARE = 0.7  # From this share of the time-out of collectives on, too, until it is over.
MAX_SHARE_OF_TIMEOUT = 0.85  # The limit is at most this share of a time-out that the job names.
START_FACTOR, LEAST_START_S = 5.0, 600.0
"""A start after a restart may take so many times as long as the longest that was seen, and ten minutes at
least: a checkpoint has to be read, data to be skipped, and a new node knows nothing of what was compiled
before."""
LEAST_FACTOR = 2.0  # What the slowest of the recent steps took is doubled before a time-out may make the limit shorter.


STARTS, ENDS = "starting", "finishing"  # Phases that a log tells of.
STEPLESS_LOOK = 0.5
"""Share of `stepless_limit` between two dumps of a run whose steps cannot be read; a tenth of it once no one
has moved."""
STEPLESS_SOON = 0.1
RHYTHM = 3  # Times between two checkpoints that were seen, to speak of a rhythm.
RARE_LOOK_S = 300.0  # Two such dumps are no further apart.


class LoopClock(Struct):
    """For how long the loop of a job has not been seen to turn, by whichever of its clocks tells, and how
    long it may."""

    age_s: float
    limit: Limit
    what: str = "no step"  # What was not seen since: a step, any movement of its ranks, a new checkpoint.
    unread: bool = False  # It is no step that is waited for: they cannot be read.

    @property
    def words(self) -> str:
        """What has not been seen, and for how long."""
        return f"{self.what} for {self.age_s:.0f} s"


def loop_clock(view: JobView, now: float, settings: PhaseLimits) -> LoopClock:
    """The clock that a job is judged by: its steps. While too few of these were seen to learn from, and the
    log announces nothing that takes its time: the movement of its ranks, once that was seen to be a
    training's; else its checkpoints, where they have a rhythm. Where there is none of these, the start-up
    grace counts.

    The other limits are learnt, too: `factor` x the longest pause, or interval, that ended by itself, never
    below `stepless_limit`."""
    progress, motion = view.progress, view.motion
    by_steps = LoopClock(age_s=progress.age_s if progress else view.run_age_s, limit=progress_limit(view, settings))
    saves_s = view.save_intervals_s if view.saved_age_s is not None else ()
    if not counts_hardly(view, settings) or view.phase == ENDS:
        return by_steps
    if motion is not None and (is_proven(motion) or len(saves_s) >= RHYTHM):
        age_s, pauses_s, what = still_s(motion, now), motion.pauses_s, "no rank has moved"
    elif view.saved_age_s is not None and len(saves_s) >= RHYTHM:
        age_s, pauses_s, what = view.saved_age_s, saves_s, "no new checkpoint"
    else:
        return by_steps
    age_s = min(age_s, view.run_age_s, progress.age_s if progress is not None else age_s)
    longest_s = settings.factor * max(pauses_s, default=0.0)
    limit = Limit(seconds=settings.stepless_limit, reason="its steps cannot be read")
    if longest_s > limit.seconds:
        why = f"{settings.factor:g} x the longest pause before; its steps cannot be read"
        limit = Limit(seconds=longest_s, reason=why)
    # No step ends a phase here. A start is over when the ranks were seen to train since; what else the log
    # tells of may still last.
    if view.phase not in (None, STARTS):
        floor_s = max(settings.evaluation_floor, settings.checkpoint_floor)
        if floor_s > limit.seconds:
            limit = Limit(seconds=floor_s, reason=f"the log says {view.phase}; its steps cannot be read")
    return LoopClock(age_s=age_s, limit=limit, what=what, unread=True)


def counts_hardly(view: JobView, settings: PhaseLimits) -> bool:
    """Whether the steps of a run cannot be read, or too few were to learn from."""
    progress = view.progress
    if progress is None:
        return True
    return progress.steps_seen < settings.warmup_steps and progress.phase is None


def look_apart_s(view: JobView, settings: PhaseLimits, *, moving: bool = False) -> float:
    """Time between two dumps of a run whose steps cannot be read: rare, until two of them are alike
    (`moving`: as before that)."""
    suspected = not moving and view.motion is not None and view.motion.still_from_at is not None
    share = STEPLESS_SOON if suspected else STEPLESS_LOOK
    return min(share * settings.stepless_limit, RARE_LOOK_S)


def with_a_step(view: JobView, seconds: float) -> float:
    """`seconds` for something between two steps, and the time of the step after it: that is logged when it is done."""
    return seconds + max(view.progress.intervals_s, default=0.0) if view.progress else seconds


def has_grown_within(view: JobView, seconds: float) -> bool:
    """Whether files of a checkpoint were seen to grow within the last `seconds`."""
    return view.growing_age_s is not None and view.growing_age_s < seconds


def has_grown_since(view: JobView, age_s: float) -> bool:
    """Whether files of a checkpoint were seen to grow since the last step, `age_s` ago: a save that no line announces,
    and that is not known to be complete."""
    return has_grown_within(view, age_s - DATES_S)


def has_just_grown(view: JobView) -> bool:
    """Whether files of a checkpoint grow: so long as they do, the loop is not expected to turn, however long it takes,
    and then the step after them takes its time."""
    return has_grown_within(view, with_a_step(view, SAVED_LATELY_S))


def saves_now(view: JobView) -> bool:
    """Whether a checkpoint is written, as far as its files or the stacks show, or was a moment ago and no step was made
    since."""
    stepped_s = view.progress.last_increase_age_s if view.progress is not None else None
    lately_s = SAVED_LATELY_S if stepped_s is None else min(SAVED_LATELY_S, stepped_s)
    saving = view.saving_age_s is not None and view.saving_age_s < lately_s
    return saving or has_grown_within(view, lately_s) or view.is_writing


def progress_limit(view: JobView, settings: PhaseLimits) -> Limit:
    """The longest time without a new step that is still normal for this run in its present phase; in training
    it stays below the time-out of collectives, see above, and below `ceiling`. Ranks that a launcher has restarted
    since the last step have all of a start before them."""
    progress = view.progress
    if progress is None:
        return _start_limit(view, settings)
    if progress.age_s >= STACKS_FROM_SHARE * settings.floor and view.renewed:
        start = learnt_limit(0, (), None, settings)
        return Limit(seconds=start.seconds, reason="its ranks were started again")
    if progress.steps_seen < settings.warmup_steps and progress.phase is None:
        return _start_limit(view, settings)
    limit = learnt_limit(
        progress.steps_seen, progress.intervals_s, progress.phase, settings, progress.phase_intervals_s
    )
    learning = progress.steps_seen < settings.warmup_steps or not progress.intervals_s
    if learning or progress.phase is not None:
        return limit
    least_s = max(settings.floor, LEAST_FACTOR * max(progress.intervals_s))
    capped = (Limit(seconds=max(each.seconds, least_s), reason=each.reason) for each in _caps(view, settings))
    return min((limit, *capped), key=lambda each: each.seconds)


def _caps(view: JobView, settings: PhaseLimits) -> Iterator[Limit]:
    """What makes the limit of a job that trains shorter than it is learnt."""
    timeout = view.collective_timeout
    if timeout is not None and not timeout.assumed:
        reason = f"collectives time out after {timeout.seconds:g} s"
        yield Limit(seconds=MAX_SHARE_OF_TIMEOUT * timeout.seconds, reason=reason)
    if settings.ceiling > 0:
        reason = "no step of it may take longer (`ceiling`, or its owner's `stall_after`)"
        yield Limit(seconds=settings.ceiling, reason=reason)


def _start_limit(view: JobView, settings: PhaseLimits) -> Limit:
    """Of a run that has made no step yet: the start-up grace, or less where an earlier run of the job shows
    how long a start takes."""
    grace = learnt_limit(0, (), None, settings)
    starts_s = [run.start_s for run in view.past if run.start_s is not None]
    if not starts_s or view.phase is not None:
        return grace
    learnt_s = max(START_FACTOR * max(starts_s), LEAST_START_S, settings.floor)
    if learnt_s >= grace.seconds:
        return grace
    return Limit(
        seconds=learnt_s,
        reason=f"{START_FACTOR:g} x the {max(starts_s):.0f} s from an earlier start to its first step",
    )


def makes_steps(view: JobView, settings: PhaseLimits) -> bool:
    """Whether a new step was *seen* within the limit. A timeout that was only restarted (after a stall of the
    controller, a restart, a filesystem that recovered) is no step: `age_s` is short then, and `last_increase_age_s` is
    not."""
    progress = view.progress
    if progress is None or progress.last_increase_age_s is None:
        return False
    return progress.last_increase_age_s < progress_limit(view, settings).seconds


def wants_stacks(view: JobView, limit: Limit, age_s: float) -> bool:
    """Whether a job without a new step for `age_s` should show its stacks now: they have to be there when the
    limit is reached, and before its collectives time out. A collective may have begun as late as the next
    step was due."""
    if age_s >= STACKS_FROM_SHARE * limit.seconds:
        return True
    timeout = view.collective_timeout
    if timeout is None:
        return False
    return TIMEOUT_STACKS_FROM_SHARE * timeout.seconds <= age_s <= with_a_step(view, timeout.seconds)
