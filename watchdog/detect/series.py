"""Statistics on series of step times, robust to single long steps. Pure.

A change of level is found by the cumulative sum of E. S. Page, "Continuous inspection schemes", Biometrika 41 (1954), on values
that are standardised with median and MAD (P. J. Huber, "Robust Statistics", 1981) and clipped, so that one evaluation of an hour
counts no more than one slow step.
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from statistics import median

from watchdog.model import Value

MAD_TO_SIGMA = 1.4826
"""Of a normal distribution: 1 / its 0.75 quantile."""
BASELINE = 20
"""Values that a level is learnt from, at least; it is learnt again at twice as many, up to MAX_BASELINE."""
MAX_BASELINE = 160
CLIP = 4.0
"""Standard deviations that one value counts at most, or the change that is looked for if that is more."""
ALARM = 6.0
"""Standard deviations that the sum has to reach. With a drift of half the shift that is looked for, Page's scheme then gives a false
alarm in some 10^5 values or more for shifts above two standard deviations (D. Siegmund, "Sequential Analysis", 1985, ch. 2)."""
NEARLY = 0.8
"""A change is estimated from few values: so much of the wanted size will do."""
SURE = 4.5
"""Standard errors by which the two medians have to differ: a job is looked at thousands of times, and chance has as many tries."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median, of normal values, as a multiple of sigma / sqrt(n): sqrt(pi / 2)."""
CONFIRMED = 8
"""Values after the change, before it is believed."""
LEAST_SHIFT = 2.0
"""Standard deviations below which no change is looked for: in noisier series only larger changes can be told from chance."""
LEAST_SIGMA = 0.002
"""Of the level: logs round their figures, and a series without any scatter would find a change in the last digit."""


class Segment(Value, frozen=True, kw_only=True):
    """A stretch of the series with one level; `begin` and `end` (exclusive) are places in it."""

    begin: int
    end: int
    level: float


def segments(values: tuple[float, ...], shift: float) -> tuple[Segment, ...]:
    """Cuts `values` (positive, oldest first) where their level changed by `shift` (0.05: five per cent) or more.

    Fewer than BASELINE values have one level. A change within the last CONFIRMED values is not told yet.
    """
    found: list[Segment] = []
    begin = 0
    while True:
        change = _first_change(values, begin, shift)
        end = len(values) if change is None else change
        if end > begin:
            found.append(Segment(begin=begin, end=end, level=median(values[begin:end])))
        if change is None:
            return tuple(found)
        begin = change


def _first_change(values: tuple[float, ...], begin: int, shift: float) -> int | None:
    """The place of the first confirmed change after `begin`."""
    learnt = BASELINE
    if len(values) - begin < learnt + CONFIRMED:
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
        clip = max(
            CLIP * sigma, wanted
        )  # in a series without noise the change itself is far beyond its scatter
        off = max(-clip, min(clip, values[place] - level))
        up, down = up + off - wanted / 2, down - off - wanted / 2
        if up <= 0.0:
            up, up_from = 0.0, place + 1
        if down <= 0.0:
            down, down_from = 0.0, place + 1
        for total, start in ((up, up_from), (down, down_from)):
            if total >= ALARM * sigma and place + 1 - start >= CONFIRMED:
                after, number = median(values[start : place + 1]), place + 1 - start
                chance = SURE * MEDIAN_ERROR * sigma * sqrt(1 / learnt + 1 / number)
                if abs(after - level) >= max(NEARLY * wanted, chance):
                    return start
    return None


def _scatter(values: tuple[float, ...]) -> float:
    """Robust standard deviation from the differences of neighbours, which a change of level does not disturb."""
    steps = [abs(b - a) for a, b in pairwise(values)]
    return MAD_TO_SIGMA * median(steps) / sqrt(2) if steps else 0.0


def _level(values: tuple[float, ...]) -> tuple[float, float]:
    """(median, robust standard deviation) of some values."""
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    return middle, max(MAD_TO_SIGMA * spread, LEAST_SIGMA * abs(middle))
