"""The loss and the time of a step that a line of a training log gives, whichever row it matches. Pure."""

from __future__ import annotations

from math import isfinite, log, nan

from slurm_watchdog.knowledge.progress_patterns import (
    GLOBAL_BATCH,
    GRADIENT_IS_NONE,
    LEFT_OUT,
    LOSS,
    OTHER_LOSS,
    PER_STEP,
    SAMPLES_PER_SECOND,
    STEP_SECONDS,
    STEPS_PER_SECOND,
)
from slurm_watchdog.parse.training_log.numbers import parse_number, scaled
from slurm_watchdog.parse.training_log.text import has_needle

RATE_NEEDLES = ("/s", "s/", "per_s", "per s", "per-s")
"""One of them is in each lower-cased line from whose rates the time of a step may be read."""


def loss_in(text: str) -> float | None:
    """The loss, NaN too where it is left out and counted, or shows only in its gradient (half precision: a
    loss of zero)."""
    lower = text.lower()
    match = LOSS.search(lower)
    if match is not None:
        loss = parse_number(match["loss"].rstrip(","))
        return nan if loss == 0.0 and GRADIENT_IS_NONE.search(text) else loss
    if "nan iterations" in lower and LEFT_OUT.search(lower):
        return nan
    other = OTHER_LOSS.search(lower)
    if other is None:
        return None
    value = parse_number(other["loss"].rstrip(","))
    if value is None or not other["log"] or not isfinite(value):
        return value
    return log(value) if value > 0 else None


def step_seconds_in(text: str) -> float | None:
    """Seconds of one step, as the line gives them, or from its rate and batch; None if it gives none."""
    lower = text.lower()
    for needle, regex in STEP_SECONDS:
        at = lower.find(needle)
        match = regex.search(lower, max(0, at - len("train_"))) if at >= 0 else None
        if match is not None:
            factor = 1000.0 if match.groupdict().get("kilo") else 1.0  # nanotron writes 1.05K for 1050
            return scaled(match["value"], factor * (0.001 if match["unit"] == "ms" else 1.0))
    return _seconds_of_rate(lower) if has_needle(RATE_NEEDLES, lower) else None


def _seconds_of_rate(lower: str) -> float | None:
    match = PER_STEP.search(lower)
    if match is not None:
        return scaled(match["value"], {"ms": 0.001, "us": 1e-6}.get(match["unit"], 1.0))
    match = STEPS_PER_SECOND.search(lower)
    if match is not None:
        rate = parse_number(match["value"] or match["named"])
        return 1 / rate if rate else None
    match, batch = SAMPLES_PER_SECOND.search(lower), GLOBAL_BATCH.search(lower)
    if match is None or batch is None:
        return None
    rate = parse_number((match["value"] or match["named"]).rstrip(","))
    return float(batch[1]) / rate if rate else None
