"""How often a job should save: the time between two checkpoints that loses least. Pure.

Where a checkpoint is short beside the time between two failures, J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17 (1974). Elsewhere the higher-order estimate of J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006), which
takes into account that a failure may come while it saves, and more than one between two checkpoints.
"""

from __future__ import annotations

from math import sqrt

from slurm_watchdog.base.structs import Struct

MUCH_SMALLER = 0.01
"""From this share of the time between two failures on, a checkpoint is not much smaller: the two formulas differ by 5 %
there, and by more above."""


class Interval(Struct, frozen=True, kw_only=True):
    """Advice for a job."""

    seconds: float
    """Of training between two checkpoints."""
    formula: str
    """Whose it is, for people: name and year."""


def checkpoint_interval(between_failures_s: float, save_s: float) -> Interval:
    """For a job that fails once in `between_failures_s` on average, and that a checkpoint holds up for `save_s`."""
    young_s = sqrt(2.0 * save_s * between_failures_s)
    if save_s < MUCH_SMALLER * between_failures_s:
        return Interval(seconds=young_s, formula="Young 1974")
    half = save_s / (2.0 * between_failures_s)
    daly_s = young_s * (1.0 + sqrt(half) / 3.0 + half / 9.0) - save_s if half < 1.0 else between_failures_s
    return Interval(seconds=daly_s, formula="Daly 2006")
