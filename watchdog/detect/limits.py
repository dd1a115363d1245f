"""How long a job may stay on one step: learnt from the job itself, wider where its phase asks for it."""

from __future__ import annotations

from typing import Protocol

from watchdog.detect.view import JobView
from watchdog.model import Value

_PHASE_FLOORS = {"evaluating": "evaluation_floor", "checkpointing": "checkpoint_floor"}


class LimitSettings(Protocol):
    """The part of the configuration that limits need; durations in seconds."""

    @property
    def floor(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def startup_grace(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def evaluation_floor(self) -> float: ...
    @property
    def checkpoint_floor(self) -> float: ...


class Limit(Value, frozen=True, kw_only=True):
    seconds: float
    reason: str
    """Half a sentence: where the number comes from."""


def with_a_step(view: JobView, seconds: float) -> float:
    """`seconds` for something between two steps, and the time of the step after it: that is logged when it is done."""
    return seconds + max(view.progress.intervals_s, default=0.0) if view.progress else seconds


def progress_limit(view: JobView, settings: LimitSettings) -> Limit:
    """The longest time without a new step that is still normal for this run in its present phase.

    max(floor, factor x slowest of the recent intervals); the start-up grace until `warmup_steps` rises were seen, and an interval
    to learn from. The step after an evaluation or a checkpoint takes its time as well, and is added to the floor of such a phase.
    """
    progress = view.progress
    if progress is None or progress.steps_seen < settings.warmup_steps or not progress.intervals_s:
        return Limit(seconds=max(settings.startup_grace, settings.floor), reason="start-up grace")
    slowest_s = max(progress.intervals_s)
    learnt_s = settings.factor * slowest_s
    if progress.phase in _PHASE_FLOORS:
        floor_s = max(float(getattr(settings, _PHASE_FLOORS[progress.phase])), settings.floor)
        return Limit(seconds=max(floor_s + slowest_s, learnt_s), reason=f"the log says {progress.phase}")
    if progress.phase is not None:
        # It starts, it finishes, or it does what we have no floor for: nothing learnt from steps says how long that takes.
        widest_s = max(
            settings.startup_grace, settings.evaluation_floor, settings.checkpoint_floor, settings.floor
        )
        return Limit(seconds=max(widest_s, learnt_s), reason=f"the log says {progress.phase}")
    if learnt_s > settings.floor:
        return Limit(
            seconds=learnt_s, reason=f"{settings.factor:g} x the slowest recent step of {slowest_s:.1f} s"
        )
    return Limit(seconds=settings.floor, reason="the configured floor")
