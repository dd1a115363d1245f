"""When the step of a training is late by its own measure: then its stacks are looked at. It accuses no one. Pure.

The limit of a job (`learnt_limit`) has to hold for jobs that no one knows: a minute at least. What this run has
shown of itself, step after step, says much sooner that something is unusual.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot

from slurm_watchdog.analysis.memo import by_identity
from slurm_watchdog.analysis.straggler import LEAST_BLOCKS, LEAST_RANKS, LEAST_SPREAD, shares
from slurm_watchdog.base.averages import median
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.cluster_view import JobView, Progress
from slurm_watchdog.model.past_runs import RankKey, WaitBlock

LEAST_STEPS, LEAST_PACES = 50, 10
"""Steps of this run before they say what is usual, and times between two lines, or reports, with a step: a log that is
read every 5 s gives one of these for all steps of that time. Where no steps are counted, LEAST_STEPS such times."""
QUANTILE = 0.99
OF_QUANTILE = 1.15  # A step is late after so many times what 99 of 100 took; …
RECENT = 100
OF_LONGEST, LEAST_MARGIN_S = 1.1, 0.75
"""… and after more than each of the last hundred: by a tenth, and by as much as reports come unevenly. Of 200 equal
times without memory the next one is beyond both less than once in a hundred: of a log that is read every 5 s, seven
times an hour, and EARLY_DUMPS_AN_HOUR is for that."""
READ_SLACK_S = 3.0
"""The log was read within an interval of reports and so much more, or no one knows whether there is a step."""
LIFT = 1.5
"""The longest time between two steps of the last day has to be exceeded so many times, before anything is concluded."""
UNSEEN_SHARE = 0.5  # Of the time since the last step so much has to be known to be without one.


def late_after_s(progress: Progress | None) -> float | None:
    """So long after the last step the next one is late; None: too little is known of this run."""
    if progress is None or len(progress.paces_s) < LEAST_PACES:
        return None
    steps = progress.step - progress.first_step if progress.step_known and progress.first_step is not None else 0
    return _late_s(progress.paces_s) if max(steps, len(progress.paces_s)) >= LEAST_STEPS else None


@by_identity
def _late_s(paces_s: tuple[float, ...]) -> float:
    ordered = sorted(paces_s)
    usual_s = ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))]
    longest_s = max(paces_s[-RECENT:])
    return max(OF_QUANTILE * usual_s, OF_LONGEST * longest_s, longest_s + LEAST_MARGIN_S)


@by_identity
def due_after_s(paces_s: tuple[float, ...]) -> float | None:
    """So long after the last step most are there: what the next report says of it is waited for. None: not known."""
    return None if len(paces_s) < LEAST_PACES else sorted(paces_s)[len(paces_s) // 2]


def is_unheard_of(progress: Progress) -> bool:
    """Whether the run has been without a step for longer than ever in the last day: what has ended by itself before
    may do so again."""
    return progress.age_s >= LIFT * progress.longest_pace_s


def is_overdue(job: JobView) -> bool:
    """Whether a step is late by the measure of its run, and this is more than a pause."""
    return is_late(job) and job.progress is not None and is_unheard_of(job.progress)


def is_late(job: JobView) -> bool:
    """Whether a job that trains, as far as its log tells, is known to have made no step for longer than is usual."""
    progress = job.progress
    late_s = late_after_s(progress)
    if progress is None or late_s is None or progress.read_age_s is None or progress.last_increase_age_s is None:
        return False
    if job.phase is not None or progress.phase is not None or progress.shared or progress.age_s < late_s:
        return False
    unseen_s = progress.age_s - progress.read_age_s
    return progress.read_age_s <= job.read_later_s + READ_SLACK_S and unseen_s >= UNSEEN_SHARE * late_s


RECENT_BLOCKS = 10  # Of a minute each: twice as many looks as `straggler` asks for at least.
LEAST_LATE = 0.1  # Of the time: what is less is no lateness that a person would look into.
ERRORS = 3.0
"""Standard errors: of 1,024 ranks that are alike one or two would be beyond by chance alone, were it not for
LEAST_LATE."""


class RankLateness(Struct):
    """Of one rank."""

    ratio: float
    """The share of the time in which the others wait and it does not; 0: as the median of all, or it waits more."""
    is_late: bool  # Whether it differs clearly.


@by_identity
def rank_lateness(blocks: tuple[WaitBlock, ...]) -> Mapping[RankKey, RankLateness]:
    """Of every rank; nothing where too little is known of one of them. `blocks`: oldest first."""
    keys = blocks[-1].ranks if blocks else ()
    recent = [each for each in blocks[-RECENT_BLOCKS:] if each.ranks is keys or each.ranks == keys]
    if len(keys) < LEAST_RANKS or len(recent) < LEAST_BLOCKS:
        return {}
    by_gpu = any(any(each.gpu_looks) for each in recent)
    found = shares(recent, by_gpu)
    if found is None:
        return {}
    waits = [1.0 - share if by_gpu else share for share, _ in found]
    middle = median(waits)
    spread = max(LEAST_SPREAD, 1.4826 * median(abs(each - middle) for each in waits))
    return {
        key: RankLateness(
            ratio=min(1.0, max(0.0, middle - wait)),
            is_late=middle - wait >= max(LEAST_LATE, ERRORS * hypot(error, spread)),
        )
        for key, wait, (_, error) in zip(keys, waits, found, strict=True)
    }
