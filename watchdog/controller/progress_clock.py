"""The progress clock: only a count that rises is progress. Pure bookkeeping: `at` and `now` are the caller's monotonic clock.

A run has one clock a counter, which is one pattern in one file. The one that was seen to rise most often gives the step;
any that rises proves that the loop turns.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from watchdog.detect.view import LossPoint, Progress, StepTime
from watchdog.model import Event

KEPT_INTERVALS = 50
"""Recent steps that the limit is learnt from."""

KEPT_TIMES = 600
"""Step times and losses that are kept for what changes slowly: at 100 s a step, most of a day."""

_BATCH = re.compile(r"(?:global|total)[ _]?(?:train[ _])?batch[ _]?size['\"]?\s*[:=]\s*(\d+)", re.IGNORECASE)
"""Megatron, NeMo, DeepSpeed and Composer name the size of the global batch so."""

Counter = tuple[str, str]
"""(file, pattern)."""


@dataclass
class Clock:
    """One counter."""

    step: int
    rose_at: float
    first_step: int
    seen: int = 1
    stride: int = 0
    total_steps: int | None = None
    begun_anew: int = 0
    lower: int | None = None
    """A lower count that was read after the highest one: a new epoch if it goes on rising."""
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_INTERVALS))
    rises: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_INTERVALS))
    """(when, step): the last of those that were read at once."""
    times: deque[StepTime] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    losses: deque[LossPoint] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))

    @property
    def step_s(self) -> float | None:
        """Median time of one step, however many of them a report brings at once."""
        times_s = [(b_at - a_at) / (b - a) for (a_at, a), (b_at, b) in pairwise(self.rises) if b_at > a_at]
        return median(times_s) if times_s else None


def apply_step(
    clocks: dict[Counter, Clock], event: Event, at: float, troubled_at: float, phase: str | None = None
) -> bool:
    """Takes a count that was logged at `at`, in `phase`, into its clock. Returns whether it is progress.

    A lower count is a new epoch once it rises by itself. An interval in which there was trouble (`troubled_at`, the last moment
    with an open incident) teaches nothing about how long steps take.
    """
    assert event.step is not None
    key = (event.source, event.pattern or "")
    clock = clocks.get(key)
    if clock is None:
        clocks[key] = Clock(step=event.step, rose_at=at, first_step=event.step, total_steps=event.total_steps)
        return True
    if event.backlog:
        clock.step = max(clock.step, event.step)
        return True
    if event.step > clock.step:
        if at > clock.rose_at > troubled_at and clock.seen > 1:
            clock.intervals_s.append(at - clock.rose_at)
        clock.stride = event.step - clock.step
        _note_time(clock, event, at, phase)
        clock.step, clock.rose_at, clock.lower = event.step, at, None
        if clock.rises and clock.rises[-1][0] == at:
            clock.rises.pop()
        clock.rises.append((at, event.step))
        clock.seen += 1
        clock.total_steps = event.total_steps or clock.total_steps
        return True
    if event.step == clock.step:
        if not clock.losses or clock.losses[-1].step != event.step:
            _note_loss(clock, event, at)
        return False
    if clock.lower is not None and event.step > clock.lower:
        clocks[key] = Clock(
            step=event.step, rose_at=at, first_step=clock.lower, total_steps=event.total_steps, seen=2,
            begun_anew=clock.begun_anew + 1,
        )  # fmt: skip
        return True
    clock.lower = event.step
    return False


def _note_time(clock: Clock, event: Event, at: float, phase: str | None) -> None:
    """The duration of the steps since the last line, and the loss, before the clock is set."""
    assert event.step is not None
    _note_loss(clock, event, at)
    seconds = event.step_s
    if seconds is None and at > clock.rose_at and clock.seen > 1:
        seconds = (at - clock.rose_at) / (event.step - clock.step)
    if seconds is not None:
        logged = event.step_s is not None
        size = _BATCH.search(event.line)
        batch = float(size[1]) if size else None
        clock.times.append(
            StepTime(step=event.step, seconds=seconds, at=at, logged=logged, phase=phase, batch=batch)
        )


def _note_loss(clock: Clock, event: Event, at: float) -> None:
    loss = math.nan if event.loss_is_no_number else event.loss
    if loss is not None and event.step is not None:
        clock.losses.append(LossPoint(step=event.step, loss=loss, at=at))


def main_clock(clocks: dict[Counter, Clock]) -> Clock | None:
    """The clock that was seen to rise most often, None where nothing was ever counted."""
    return max(clocks.values(), key=lambda clock: (clock.seen, clock.rose_at), default=None)


def read_progress(
    clocks: dict[Counter, Clock], phase: tuple[str, float] | None, grace_from: float, now: float
) -> Progress | None:
    """What the clocks say at `now`, None if nothing was ever counted. No age reaches back behind `grace_from`; `phase` is its
    name and when it began."""
    if not clocks:
        return None
    (source, _), main = max(clocks.items(), key=lambda item: (item[1].seen, item[1].rose_at))
    newest = max(clock.rose_at for clock in clocks.values() if clock.seen > 1 or clock is main)
    rises = [clock.rose_at for clock in clocks.values() if clock.seen > 1]
    return Progress(
        step=main.step,
        age_s=max(0.0, now - max(newest, grace_from)),
        rose_age_s=max(0.0, now - max(rises)) if rises else None,
        steps_seen=main.seen,
        intervals_s=tuple(main.intervals_s),
        step_s=main.step_s,
        stride=max(1, main.stride),
        total_steps=main.total_steps,
        first_step=main.first_step,
        begun_anew=main.begun_anew,
        phase=phase[0] if phase else None,
        phase_age_s=now - phase[1] if phase else 0.0,
        source=source,
    )
