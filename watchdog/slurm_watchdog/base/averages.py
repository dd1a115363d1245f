"""Means and medians as those of the statistics module, which brings fractions, decimals and random numbers with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum


def fmean(values: Iterable[float]) -> float:
    """The mean."""
    known = list(values)
    return fsum(known) / len(known)


def median(values: Iterable[float]) -> float:
    """The one in the middle, or the mean of both; there is one."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median_low(values: Iterable[float]) -> float:
    """The one in the middle, the lower of two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def midmean(values: Sequence[float]) -> float:
    """The interquartile mean, nearly as exact as a mean, and blind to pauses in less than a quarter of the values: the
    mean of those between the quartiles; of fewer than three values, of all. `values` is not empty."""
    cut = (len(values) + 2) // 4 if len(values) > 2 else 0
    return fmean(sorted(values)[cut : len(values) - cut])
