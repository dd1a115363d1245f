"""Where a loss jumps far above where it was, and whether it came back: for a job that runs, and for a log. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.analysis.level_shift import MAD_TO_SIGMA
from slurm_watchdog.base.averages import median
from slurm_watchdog.base.structs import Struct

WINDOW = 100  # Losses before the newest ones that say what is usual.
LEAST = 20
DEVIATIONS = 8.0  # Standard deviations above the usual losses.
PERCENT = 10.0  # Above the median of the usual losses, besides: where they hardly vary, deviations alone say little.
NEWEST = 3  # So many in a row have to be high: one outlier is a bad batch. As many have to be low again for the end.
LEARN_EVERY = 20


class Spike(Struct, kw_only=False):
    """Places are those of the series."""

    begin: int  # Of the first high loss.
    end: int | None  # Of the first one that was low again; None while it lasts.
    peak: int
    usual: float  # The median before.


def find_spikes(losses: Sequence[float], percent: float = PERCENT, least: int = LEAST) -> list[Spike]:
    """The spikes of `losses` (finite, oldest first): NEWEST in a row that are DEVIATIONS and `percent` above the
    usual ones. The first `least` say what is usual.

    Losses within a spike do not teach what is usual, however long it lasts.
    """
    usual_ones = list(losses[:least])
    if len(losses) < least + NEWEST:
        return []
    limit, usual = _limit(usual_ones, percent)
    found: list[Spike] = []
    began: int | None = None
    run = 0  # Losses in a row on the other side of the limit than the state says.
    for place, loss in enumerate(losses[least:], least):
        is_high = loss > limit
        run = run + 1 if is_high is (began is None) else 0
        if run >= NEWEST:
            if began is not None:
                found.append(_spike(losses, began, place - NEWEST + 1, usual))
            began, run = (place - NEWEST + 1 if began is None else None), 0
        if began is None and not is_high:
            usual_ones.append(loss)
            if len(usual_ones) % LEARN_EVERY == 0:
                limit, usual = _limit(usual_ones[-WINDOW:], percent)
    if began is not None:
        found.append(_spike(losses, began, None, usual))
    return found


def _spike(losses: Sequence[float], begin: int, end: int | None, usual: float) -> Spike:
    last = len(losses) if end is None else end
    return Spike(begin, end, max(range(begin, last), key=lambda place: losses[place]), usual)


def _limit(losses: list[float], percent: float) -> tuple[float, float]:
    """(what counts as high, median) of usual losses."""
    usual = median(losses)
    sigma = MAD_TO_SIGMA * median([abs(loss - usual) for loss in losses])
    return usual + max(DEVIATIONS * sigma, abs(usual) * percent / 100), usual
