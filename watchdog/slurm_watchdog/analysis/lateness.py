"""When the step of a training is late by its own measure: then its stacks are looked at. It accuses no one. Pure.

The limit of a job (`learnt_limit`) has to hold for jobs that no one knows: a minute at least. What this run has
shown of itself, step after step, says much sooner that something is unusual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, sqrt

from slurm_watchdog.base.averages import fmean, median
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.cluster_view import JobView, Progress
from slurm_watchdog.model.past_runs import WHOLE, RankKey, WaitBlock

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
READ_SLACK_S = 3.0  # The log was read within an interval of reports and so much more, else nothing is known of a step.
LIFT = 1.5  # Of the longest time between two steps of the last day, before anything is concluded.
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


LEAST_RANKS = 4  # With fewer, there is no one to compare with.
LEAST_S, LEAST_LOOKS, LEAST_BLOCKS = 230.0, 60, 4
"""Of each rank before the change, and since: so long its sleep is known (four readings, a minute apart), or so many
looks at its GPU, which are five minutes at the shipped interval."""
ROUNDED = 0.5 / WHOLE
LEAST_SPREAD = 0.05  # Of the others' shares: what no look can tell apart.
RECENT_BLOCKS = 10  # Of a minute each: twice as many looks as `straggler` asks for at least.
LEAST_LATE = 0.1  # Of the time: what is less is no lateness that a person would look into.
ERRORS = 3.0  # Standard errors: of 1,024 ranks that are alike one or two would be beyond, were it not for LEAST_LATE.


class RankLateness(Struct):
    """Of one rank."""

    ratio: float  # Share of the time in which the others wait and it does not; 0: as the median, or it waits more.
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


def shares(blocks: Sequence[WaitBlock], by_gpu: bool) -> list[tuple[float, float]] | None:
    """(share, standard error) of each rank. The error is by how much blocks differ, of this rank or of all,
    whichever is more; of looks at a GPU it is no less than chance gives for so many.

    Sums over all ranks, one block after the other: 0.25 s for 4,096 ranks and three hours, half of what a rank after
    the other takes.
    """
    count = len(blocks[-1].ranks)
    seen, weights, sums, squares = [0] * count, [0] * count, [0] * count, [0] * count
    for block in blocks:
        of, share = (block.gpu_looks, block.gpu_idle) if by_gpu else (block.seconds, block.asleep)
        seen = [n + (w > 0) for n, w in zip(seen, of, strict=True)]
        weights = [n + w for n, w in zip(weights, of, strict=True)]
        sums = [n + w * v for n, w, v in zip(sums, of, share, strict=True)]
        squares = [n + w * v * v for n, w, v in zip(squares, of, share, strict=True)]
    if min(seen) < LEAST_BLOCKS or min(weights) < (LEAST_LOOKS if by_gpu else LEAST_S):
        return None
    found = []
    for n, weight, total, square in zip(seen, weights, sums, squares, strict=True):
        mean = total / weight
        spread = max(0.0, square / weight - mean * mean) / (n - 1) / WHOLE**2
        careful = (total / WHOLE + 0.5) / (weight + 1)  # never 0: of 60 looks none proves little
        found.append((mean / WHOLE, spread, careful * (1 - careful) / weight if by_gpu else ROUNDED**2))
    usual = fmean(spread for _, spread, _ in found)
    return [(share, sqrt(max(spread, usual, chance))) for share, spread, chance in found]
