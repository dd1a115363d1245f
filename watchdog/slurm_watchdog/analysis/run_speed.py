"""How fast one run of a job is, to be compared with its other runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from slurm_watchdog.analysis.slow_node_search import BATCH, level_of, measure
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.cluster_view import StepTime

LEAST_UNLOGGED_S = 30.0
"""Times that the log does not say itself are as exact as the agent's interval of 5 s: shorter steps cannot be
compared so."""
SKIPPED = 3
"""First steps of a run, which compile, warm caches and fill pipelines."""


class RunSpeed(Struct, frozen=True):
    """The speed of a run, or of a part of it."""

    level: float
    """Logarithm of the seconds of a step."""
    error: float
    """Standard error of `level`."""
    batches: int
    at: float
    """When the newest of these steps was made, on the clock of `ClusterView.now`."""


def comparable(times: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """The steps of which one may be compared with another: training, of the present batch size, exact enough."""
    usable = [
        t for t in times[SKIPPED:] if t.phase is None and t.seconds > 0 and (t.logged or t.seconds >= LEAST_UNLOGGED_S)
    ]
    if not usable:
        return ()
    last = usable[-1]
    return tuple(t for t in usable if t.batch == last.batch and t.logged == last.logged)


def run_speed(times: Sequence[StepTime], history: Sequence[StepTime], least_s: float) -> RunSpeed | None:
    """The speed over at least `least_s`, for what jobs share is slow for some minutes now and then: of single steps
    (comparable ones) where they reach that far, else of the blocks of the run's history. None: it is not known yet."""
    if _span_s(times) >= least_s and (found := measure([each.seconds for each in times])) is not None:
        return RunSpeed(*found, len(times) // BATCH, times[-1].at)
    if _span_s(history) >= least_s and (found := level_of([log(each.seconds) for each in history])) is not None:
        return RunSpeed(*found, len(history), history[-1].at)
    return None


def _span_s(times: Sequence[StepTime]) -> float:
    return times[-1].at - times[0].at if times else 0.0
