"""How long a run may be without a new step: one rule, for the log of a job that runs and for one that someone sent.

The constants are in the configuration (detectors, `stalled_progress` and its like), each with its source.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.limits import PhaseLimits

_PHASE_FLOORS = {"evaluating": "evaluation_floor", "checkpointing": "checkpoint_floor"}


class Limit(Struct):
    seconds: float
    reason: str  # Half a sentence: where the number comes from.


def learnt_limit(
    steps_seen: int,
    intervals_s: Sequence[float],
    phase: str | None,
    settings: PhaseLimits,
    phase_intervals_s: Sequence[float] = (),
) -> Limit:
    """The longest time without a new step that is still normal.

    `steps_seen`: rises of the step so far. `intervals_s`: seconds between the recent ones. `phase`: what the
    log said last, None in training. max(floor, factor x slowest of the recent intervals); the start-up grace
    until `warmup_steps` rises were seen, and an interval to learn from. The step after an evaluation or a
    checkpoint takes its time as well, and is added to the floor of such a phase; nothing learnt from steps
    says how long a start, an end, or a phase without a floor takes. `phase_intervals_s`: of the recent intervals those
    with this phase in them.
    """
    if steps_seen < settings.warmup_steps or not intervals_s:
        return Limit(seconds=max(settings.startup_grace, settings.floor), reason="start-up grace")
    slowest_s = max(intervals_s)
    learnt_s = settings.factor * max((slowest_s, *phase_intervals_s))
    if phase in _PHASE_FLOORS:
        floor_s = max(float(getattr(settings, _PHASE_FLOORS[phase])), settings.floor)
        return Limit(seconds=max(floor_s + slowest_s, learnt_s), reason=f"the log says {phase}")
    if phase is not None:
        widest_s = max(settings.startup_grace, settings.evaluation_floor, settings.checkpoint_floor, settings.floor)
        return Limit(seconds=max(widest_s, learnt_s), reason=f"the log says {phase}")
    if learnt_s > settings.floor:
        return Limit(seconds=learnt_s, reason=f"{settings.factor:g} x the slowest recent step of {slowest_s:.1f} s")
    return Limit(seconds=settings.floor, reason="the minimum")
