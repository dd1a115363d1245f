"""How long steps took, and their losses, from the lines of one counter. Pure bookkeeping."""

from __future__ import annotations

import math
import re

from slurm_watchdog.controller.state.counter_clock import CounterClock
from slurm_watchdog.model.cluster_view import LossPoint, StepTime
from slurm_watchdog.model.observations import Event

_BATCH = re.compile(
    r"(?:(?:global|total|effective)[ _]?(?:train[ _])?batch(?:[ _]?size)?|"
    r"(?<!micro)(?<!micro[ _])(?<![a-z])(?:batch[ _]?size|gbs))['\"]?\s*[:=]\s*(\d+)",
    re.IGNORECASE,
)
"""Megatron, NeMo, DeepSpeed and Composer name the size of the global batch so; others say `batch_size` or `gbs`."""
_SAMPLES = re.compile(
    r"(?:consumed|processed|seen|total|trained)[ _]samples['\"]?\s*[:=]\s*(\d[\d,_]*)",
    re.IGNORECASE,
)
"""What rises by a batch a step. Tokens do not: where lines are packed, each batch has another number of them."""


def add_time(clock: CounterClock, event: Event, at: float, phase: str | None) -> None:
    """The duration of the steps since the last line, and the loss, before the clock is set."""
    assert event.step is not None
    add_loss(clock, event, at)
    batch = _batch(clock, event)
    seconds, logged = event.step_s, True
    if seconds is None and event.written_s is not None:
        seconds = clock.lines.step_seconds(event.step, event.written_s, phase is not None)
    elif seconds is None and clock.rises:
        _add_time_by_report(clock, event, at, phase, batch)
        return
    if seconds is not None:
        time = StepTime(step=event.step, seconds=seconds, at=at, logged=logged, phase=phase, batch=batch)
        clock.times.append(time)
        clock.history.add(time)
        clock.grew()


def _add_time_by_report(clock: CounterClock, event: Event, at: float, phase: str | None, batch: float | None) -> None:
    """Where neither the line nor its date says how long a step takes: all steps of one look of the agent
    share the time since the look before. A line that came in the same look corrects it."""
    assert event.step is not None
    same = clock.rises[-1][0] == at
    if same and len(clock.rises) < 2:
        return
    from_at, from_step = clock.rises[-2] if same else clock.rises[-1]
    if event.step <= from_step or at <= from_at:
        return
    last = clock.times[-1] if clock.times and not clock.times[-1].logged else None
    if same and last is not None and last.at == at:
        phase = last.phase
        clock.times.pop()
    elif last is not None:
        clock.history.add(last)
    seconds = (at - from_at) / (event.step - from_step)
    clock.times.append(StepTime(step=event.step, seconds=seconds, at=at, logged=False, phase=phase, batch=batch))
    clock.grew()


def _batch(clock: CounterClock, event: Event) -> float | None:
    """Samples a step, as the line says itself or as what was consumed has risen since the line before; before
    the clock is set. To compare by: rounded to the three digits that a ramp changes."""
    size = _BATCH.search(event.line)
    if size is not None:
        return float(size[1])
    consumed = _SAMPLES.search(event.line)
    before, clock.consumed = clock.consumed, None
    if consumed is None or event.step is None or event.step <= clock.step:
        return None
    clock.consumed = float(consumed[1].replace(",", "").replace("_", ""))
    if before is None or clock.consumed <= before:
        return None
    return float(f"{(clock.consumed - before) / (event.step - clock.step):.3g}")


def add_loss(clock: CounterClock, event: Event, at: float) -> None:
    loss = math.nan if event.loss_is_no_number else event.loss
    if loss is not None and event.step is not None:
        clock.losses.append(LossPoint(step=event.step, loss=loss, at=at))
        clock.grew()
