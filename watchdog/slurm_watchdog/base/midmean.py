"""The interquartile mean: nearly as exact as a mean, and blind to pauses in less than a quarter of the values."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def midmean(values: Sequence[float]) -> float:
    """The mean of the values between the quartiles; of fewer than three values, of all. `values` is not empty."""
    cut = (len(values) + 2) // 4 if len(values) > 2 else 0
    return fmean(sorted(values)[cut : len(values) - cut])
