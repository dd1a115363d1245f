"""slurm_watchdog.analysis.lost_time: Young's where it holds, Daly's elsewhere."""

from __future__ import annotations

from math import expm1

import pytest

from slurm_watchdog.analysis.lost_time import MUCH_SMALLER, checkpoint_interval

DAY = 86400.0


def lost(interval_s: float, between_s: float, save_s: float) -> float:
    """Time that a second of work takes, without the restarts: failures come at random (the model of Daly 2006)."""
    return between_s * expm1((interval_s + save_s) / between_s) / interval_s


def test_of_a_short_checkpoint_the_interval_is_youngs() -> None:
    # One failure a day, and a minute to save: sqrt(2 x 60 s x 86,400 s).
    found = checkpoint_interval(DAY, 60.0)
    assert (found.seconds, found.formula) == (pytest.approx((2 * 60 * DAY) ** 0.5), "Young 1974")


@pytest.mark.parametrize(
    ("save_s", "seconds"), [(0.02 * DAY, 16_147.2), (DAY / 2, 60_000.0), (2 * DAY, DAY), (9 * DAY, DAY)]
)
def test_of_a_long_checkpoint_it_is_dalys(save_s: float, seconds: float) -> None:
    found = checkpoint_interval(DAY, save_s)
    assert (found.seconds, found.formula) == (pytest.approx(seconds), "Daly 2006")


def test_just_below_the_bound_the_formulas_differ_by_five_per_cent() -> None:
    below, above = (checkpoint_interval(DAY, DAY * MUCH_SMALLER * factor) for factor in (0.9999, 1.0001))
    assert (below.formula, above.formula) == ("Young 1974", "Daly 2006")
    assert below.seconds / above.seconds == pytest.approx(1.05, abs=0.01)


@pytest.mark.parametrize("share", [0.001, 0.005, 0.02, 0.1, 0.3, 0.7, 1.0])
def test_no_interval_loses_much_less_than_the_one_that_is_advised(share: float) -> None:
    save_s = share * DAY
    best = min(lost(n * DAY / 1000, DAY, save_s) for n in range(1, 3000))
    assert lost(checkpoint_interval(DAY, save_s).seconds, DAY, save_s) <= 1.002 * best
