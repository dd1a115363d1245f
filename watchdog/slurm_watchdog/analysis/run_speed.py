"""How fast one run of a job is, to be compared with its other runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log, sqrt
from statistics import fmean

from slurm_watchdog.base.midmean import midmean
from slurm_watchdog.model.cluster_view import StepTime
from slurm_watchdog.model.slow_search import SearchRun

LEAST_UNLOGGED_S = 30.0
"""Times that the log does not say itself are as exact as the agent's interval of 5 s: shorter steps cannot be
compared so."""
SKIPPED = 3
"""First steps of a run, which compile, warm caches and fill pipelines."""
BATCH, LEAST_BATCHES = 10, 6
"""Steps of one batch (see level_shift), and batches of a run whose speed is measured."""


def comparable(times: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """The steps of which one may be compared with another: training, of the present batch size, exact enough."""
    usable = [
        t for t in times[SKIPPED:] if t.phase is None and t.seconds > 0 and (t.logged or t.seconds >= LEAST_UNLOGGED_S)
    ]
    if not usable:
        return ()
    last = usable[-1]
    return tuple(t for t in usable if t.batch == last.batch and t.logged == last.logged)


def run_speed(times: Sequence[StepTime], history: Sequence[StepTime], least_s: float) -> SearchRun | None:
    """The speed over at least `least_s`, for what jobs share is slow for some minutes now and then: of single steps
    (comparable ones) where they reach that far, else of the blocks of the run's history. None: it is not known yet."""
    logs = [log(each.seconds) for each in times[SKIPPED:] if each.seconds > 0]
    batches = [midmean(logs[at : at + BATCH]) for at in range(0, len(logs) - BATCH + 1, BATCH)]
    blocks = [log(each.seconds) for each in history]
    for means, of in ((batches, times), (blocks, history)):
        if len(means) >= LEAST_BATCHES and of[-1].at - of[0].at >= least_s:
            return SearchRun(level=fmean(means), error=_error(means), batches=len(means), at=of[-1].at)
    return None


def _error(means: Sequence[float]) -> float:
    """The standard error of their mean, by how much neighbours are alike."""
    rest = [mean - fmean(means) for mean in means]
    whole = sum(v * v for v in rest)
    together = sum(a * b for a, b in pairwise(rest)) / whole if whole else 0.0
    r = min(0.9, together) if together > 2 / sqrt(len(rest)) else 0.0  # less is what chance gives
    return sqrt(whole / (len(rest) - 1) / len(rest) * (1 + r) / (1 - r))
