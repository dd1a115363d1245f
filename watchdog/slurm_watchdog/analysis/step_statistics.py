"""Changes of level in the step times of a log, of which no more will come: robust to single long steps. Pure.

A change of level is suspected by the cumulative sum of E. S. Page, "Continuous inspection schemes",
Biometrika 41 (1954), on values that are standardised with median and MAD (P. J. Huber, "Robust Statistics",
1981) and clipped, so that one evaluation of an hour counts no more than one slow step.

It is believed when the ranks say so as well: the test of H. B. Mann and D. R. Whitney (Annals of Math. Statistics 18,
1947) on the values before and after, as D. M. Hawkins and Q. Deng use it in "A nonparametric change-point control
chart", Journal of Quality Technology 42 (2010). Its error does not depend on how the values are distributed: of a job
in which every fourth step pauses, the pauses are among the values before, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from math import sqrt

from slurm_watchdog.analysis.level_shift import LEAST_SIGMA, MAD_TO_SIGMA, NEARLY, PERHAPS
from slurm_watchdog.base.averages import median
from slurm_watchdog.base.structs import Struct

BASELINE = 20  # Values that a level is learnt from, at least; it is learnt again at twice as many, up to MAX_BASELINE.
MAX_BASELINE = 160
CLIP = 4.0  # Standard deviations that one value counts at most, or the change that is looked for if that is more.
ALARM = 6.0
"""Standard deviations that the sum has to reach. With a drift of half the shift that is looked for, Page's
scheme then gives a false alarm in some 10^5 values or more for shifts above two standard deviations (D.
Siegmund, "Sequential Analysis", 1985, ch. 2)."""
SURE = 4.5
"""Standard errors of the rank test: a job is looked at thousands of times, and chance has as many tries. Of
200 series of 600 values each, of forty kinds of noise (normal, skewed, remembering, with pauses in a tenth to
a half of the steps), at most three had a change, and none for most kinds. Bursts of a dozen slow steps and
more are reported: while they last the job is slower."""
MEDIAN_ERROR = 1.2533  # Standard error of a median, of normal values, as a multiple of sigma / sqrt(n): sqrt(pi / 2).
MOST_MEMORY = 0.9  # Correlation of neighbours up to which it is reckoned with.
UNDISTURBED = 0.5
"""Of the wanted size: by so much the lower quartiles have to differ. Pauses are added to a step and never taken from
it: where only they have become more, the quickest steps are as quick as before, and no step is slower."""
CONFIRMED = 8  # Values after the change, at least, before it is believed.
NEWEST = 3  # The median of so many newest ones has to be off as well: of a burst that has just ended most values are.
LEAST_SHIFT = 2.0  # Standard deviations: in noisier series only larger changes can be told from chance.


class Segment(Struct):
    """A stretch of the series with one level; `begin` and `end` (exclusive) are places in it."""

    begin: int
    end: int
    level: float


def segments(values: tuple[float, ...], shift: float, confirmed: int = CONFIRMED) -> tuple[Segment, ...]:
    """Cuts `values` (positive, oldest first) where their level changed by `shift` (0.05: five per cent) or more.

    Fewer than BASELINE values have one level. A change within the last `confirmed` values is not reported yet.
    """
    found: list[Segment] = []
    begin = 0
    while True:
        change = _first_change(values, begin, shift, confirmed)
        end = len(values) if change is None else change
        if end > begin:
            found.append(Segment(begin=begin, end=end, level=median(values[begin:end])))
        if change is None:
            return tuple(found)
        begin = change


def _first_change(values: tuple[float, ...], begin: int, shift: float, confirmed: int) -> int | None:
    """The place of the first confirmed change after `begin`."""
    learnt = BASELINE
    if len(values) - begin < learnt + confirmed:
        return None
    scatter = _scatter(values[begin:])
    level, sigma = _level(values[begin : begin + learnt])
    sigma = max(sigma, scatter)  # twenty values alone may look quiet by chance
    wanted = max(shift * level, LEAST_SHIFT * sigma)
    up = down = 0.0
    up_from = down_from = begin + learnt
    for place in range(begin + learnt, len(values)):
        if place - begin >= 2 * learnt and learnt < MAX_BASELINE and up == down == 0.0:
            learnt *= 2
            level, sigma = _level(values[begin : begin + learnt])
            sigma = max(sigma, scatter)
            wanted = max(shift * level, LEAST_SHIFT * sigma)
        clip = max(CLIP * sigma, wanted)  # in a series without noise the change itself is far beyond its scatter
        off = max(-clip, min(clip, values[place] - level))
        up, down = up + off - wanted / 2, down - off - wanted / 2
        if up <= 0.0:
            up, up_from = 0.0, place + 1
        if down <= 0.0:
            down, down_from = 0.0, place + 1
        for total, start, sign in ((up, up_from, 1), (down, down_from, -1)):
            if total >= ALARM * sigma and place + 1 - start >= confirmed:
                before, after = values[begin:start], values[start : place + 1]
                if _is_changed(before, after, sign * wanted):
                    return start
    return None


def _is_changed(before: tuple[float, ...], after: tuple[float, ...], wanted: float) -> bool:
    """Whether the level of `after` is another one, by about `wanted` (negative: a fall) or more, and not by chance."""
    sign, size = (1, wanted) if wanted > 0 else (-1, -wanted)
    old, new = sorted(before), sorted(after)
    error = MEDIAN_ERROR * _level(before[-MAX_BASELINE:])[1] * sqrt(1 / min(len(old), MAX_BASELINE) + 1 / len(new))
    if sign * (median(new) - median(old)) < max(NEARLY * size, size - PERHAPS * error):
        return False
    if sign * (median(after[-NEWEST:]) - median(old)) < UNDISTURBED * size:
        return False
    if sign * (new[(len(new) - 1) // 4] - old[(len(old) - 1) // 4]) < UNDISTURBED * size:  # the lower quartiles
        return False
    score = sign * _rank_score(old, new)
    if score < SURE:
        return False
    r = _memory(before)
    return score >= SURE * sqrt((1 + r) / (1 - r))


def _rank_score(old: list[float], new: list[float]) -> float:
    """How much larger the values of `new` are, by their ranks: standard errors of Mann and Whitney. Both are sorted."""
    n, m = len(old), len(new)
    larger = sum(bisect_left(old, value) + bisect_right(old, value) for value in new) / (2 * n * m)
    return (larger - 0.5) / sqrt((n + m + 1) / (12 * n * m))


def _memory(values: tuple[float, ...]) -> float:
    """Correlation of the ranks of neighbours, less what chance alone may give: where slow steps come together, many of
    them are no more evidence than a few. The variance of a mean grows by (1 + r) / (1 - r) (M. S. Bartlett, 1935)."""
    n, ordered = len(values), sorted(values)
    ranks = [bisect_left(ordered, value) + bisect_right(ordered, value) - n for value in values]
    together = sum(a * b for a, b in pairwise(ranks)) / max(1, sum(a * a for a in ranks))
    return max(0.0, min(MOST_MEMORY, together - 1 / sqrt(n)))


def _scatter(values: tuple[float, ...]) -> float:
    """Robust standard deviation from the differences of neighbours, which a change of level does not disturb."""
    steps = [abs(b - a) for a, b in pairwise(values)]
    return MAD_TO_SIGMA * median(steps) / sqrt(2) if steps else 0.0


def _level(values: tuple[float, ...]) -> tuple[float, float]:
    """(median, robust standard deviation) of some values."""
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    return middle, max(MAD_TO_SIGMA * spread, LEAST_SIGMA * abs(middle))
