"""How long a job may stay on one step: learnt from the job itself, wider where its phase asks for it.

The time-out of collectives, where it is known, works in two ways. When it runs out, the ranks abort, and the
stacks are lost: so stacks are collected before, in every phase, also where a limit is far away; that accuses
no one. And where a job trains and its pace is known, no limit is longer than most of a time-out that the
job's own command line or environment names; never shorter than the floor, nor than twice its slowest step. An
evaluation or a checkpoint keeps its floor: ranks that work for long are in no collective that could time out,
and for those that wait for rank 0 the program has another time-out, which no one can see.

Stacks may show what takes long. A transfer may take half an hour; it moves bytes, though, and the kernel counts them
for each connection. So it gets less where no one answers: dump after dump every rank outside the collective waits in
the same frames for the same connection, on which nothing came or went, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_watchdog.analysis.job_state import moves_data
from slurm_watchdog.analysis.rank_activity import loop_state
from slurm_watchdog.analysis.rank_motion import (
    did_nothing,
    is_in_training_code,
    is_proven,
    is_serving,
    is_training,
    still_s,
    used_nothing,
    waits_for_others_work,
)
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Culprit, StackRequest

DATES_S = 2.0  # Dates of a look and of a file are so exact.
GROWS_S = 20.0  # Agents look every 5 s at a checkpoint that is being written.
SAVED_LATELY_S = 60.0  # A checkpoint that was seen to grow so lately may still be written: agents look every 30 s.
STACKS_FROM_SHARE = 0.5  # From this share of the limit on, stacks are collected: the verdict is ready at the limit.
TIMEOUT_STACKS_FROM_SHARE = 0.7  # From this share of the time-out of collectives on, too, until it is over.
MAX_SHARE_OF_TIMEOUT = 0.85  # The limit is at most this share of a time-out that the job names.
START_FACTOR, LEAST_START_S = 5.0, 600.0
"""A start after a restart may take so many times as long as the longest that was seen, and ten minutes at least: a
checkpoint has to be read, data to be skipped, and a new node knows nothing of what was compiled before."""
LEAST_FACTOR = 2.0  # What the slowest of the recent steps took is doubled before a time-out may make the limit shorter.


STARTS, ENDS, EVALUATES, SAVES = "starting", "finishing", "evaluating", "checkpointing"  # Phases that a log tells of.
STEPLESS_LOOK = 0.5  # Share of `stepless_limit` between two dumps where steps cannot be read; …
STEPLESS_SOON = 0.1  # … once no one has moved.
RHYTHM = 3  # Times between two checkpoints that were seen, to speak of a rhythm.
RARE_LOOK_S = 300.0  # Two such dumps are no further apart.
LEAST_APART_S = 15.0  # From the first dump to the last: a transfer that stutters moves something in so many seconds.
KNOWN_PHASES = 3  # So many evaluations of a run tell how long the next one takes.
RECEIVES = frozenset({"recvfrom", "recvmsg", "read", "readv", "poll", "ppoll"})
"""Calls in which a thread waits for what a connection brings; Python polls where a time-out is set."""
_PHASE_FLOORS = {EVALUATES: "evaluation_floor", SAVES: "checkpoint_floor"}


class Limit(Struct):
    seconds: float
    reason: str  # Half a sentence: where the number comes from.


def learnt_limit(
    steps_seen: int,
    intervals_s: Sequence[float],
    phase: str | None,
    settings: PhaseLimits,
    phase_intervals_s: Sequence[float] = (),
) -> Limit:
    """The longest time without a new step that is still normal.

    `steps_seen`: rises of the step so far. `intervals_s`: seconds between the recent ones. `phase`: what the log said
    last, None in training. max(floor, factor x slowest of the recent intervals); the start-up grace until
    `warmup_steps` rises were seen, and an interval to learn from. The step after an evaluation or a checkpoint takes
    its time as well, and is added to the floor of such a phase; nothing learnt from steps says how long a start, an
    end, or a phase without a floor takes. `phase_intervals_s`: of the recent intervals those with this phase in them.
    """
    if steps_seen < settings.warmup_steps or not intervals_s:
        return Limit(seconds=max(settings.startup_grace, settings.floor), reason="start-up grace")
    slowest_s = max(intervals_s)
    learnt_s = settings.factor * max((slowest_s, *phase_intervals_s))
    if phase in _PHASE_FLOORS:
        floor_s = max(float(getattr(settings, _PHASE_FLOORS[phase])), settings.floor)
        return Limit(seconds=max(floor_s + slowest_s, learnt_s), reason=f"the log says {phase}")
    if phase is not None:
        widest_s = max(settings.startup_grace, settings.evaluation_floor, settings.checkpoint_floor, settings.floor)
        return Limit(seconds=max(widest_s, learnt_s), reason=f"the log says {phase}")
    if learnt_s > settings.floor:
        return Limit(seconds=learnt_s, reason=f"{settings.factor:g} x the slowest recent step of {slowest_s:.1f} s")
    return Limit(seconds=settings.floor, reason="the minimum")


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
    """The clock that a job is judged by: its steps. While too few of these were seen to learn from, and the log
    announces nothing that takes its time: the movement of its ranks, once that was seen to be a training's; else its
    checkpoints, where they have a rhythm. Where there is none of these, the start-up grace counts.

    The other limits are learnt, too: `factor` x the longest pause, or interval, that ended by itself, never below
    `stepless_limit`."""
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


@by_identity
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
    """Whether a job without a new step for `age_s` should show its stacks now: they have to be there when the limit is
    reached, and before its collectives time out. A collective may have begun as late as the next step was due."""
    if age_s >= STACKS_FROM_SHARE * limit.seconds:
        return True
    timeout = view.collective_timeout
    if timeout is None:
        return False
    return TIMEOUT_STACKS_FROM_SHARE * timeout.seconds <= age_s <= with_a_step(view, timeout.seconds)


# -------------------------------------------------------------------------------- by what stacks show


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


# -------------------------------------------------------------------------------- of runs whose steps cannot be read

STEPLESS_AFTER = 0.5  # Share of `stepless_limit` after which a run without a step is looked at.
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
