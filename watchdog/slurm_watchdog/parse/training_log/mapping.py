"""Lines of a training log that are JSON, or a printed Python dictionary. Pure."""

from __future__ import annotations

import ast
import re
import warnings
from math import isfinite
from typing import Any

import msgspec

from slurm_watchdog.knowledge.progress_patterns import (
    EPOCH_KEYS,
    GRADIENT_IS_NONE,
    HEARTBEAT_KEY,
    HEARTBEAT_PATTERN,
    LOSS_KEYS,
    MILLISECONDS_KEYS,
    RATE_KEYS,
    SECONDS_KEYS,
    STEP_KEYS,
    TOTAL_KEYS,
    TRAINING_KEYS,
)
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.fact import LogFact
from slurm_watchdog.parse.training_log.measurements import loss_in
from slurm_watchdog.parse.training_log.numbers import count_of, float_of
from slurm_watchdog.parse.training_log.text import has_needle

NO_NUMBER = ("NaN", "nan", "Inf", "inf")
"""As writers of JSON put what it has no word for."""
_NO_NUMBER = re.compile(r"(?<=[:\[,\s])(-?(?:NaN|nan|Infinity|[Ii]nf))(?=\s*[,}\]])")
MAPPING = re.compile(r"\s*\{(?! ?[A-Za-z]+:)")
"""JSON, or a dictionary; MindFormers writes `{ Epoch:[ 1/ 2], step:[…` around its lines."""


def from_mapping(text: str, who: dict[str, Any]) -> LogFact | None:
    """A line of JSON, or a Python dictionary as the Hugging Face Trainer prints it: progress if it has a step."""
    pattern = HEARTBEAT_PATTERN if HEARTBEAT_KEY in text else "json"
    try:
        data = msgspec.json.decode(_NO_NUMBER.sub(r'"\1"', text) if has_needle(NO_NUMBER, text) else text)
    except (msgspec.MsgspecError, RecursionError):
        pattern = "hf_trainer"
        try:
            with warnings.catch_warnings():
                # Of what is no Python, the compiler complains on standard error.
                warnings.simplefilter("ignore")
                data = ast.literal_eval(re.sub(r"\b(nan|inf)\b", r"'\1'", text))
        except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
            return None
    if not isinstance(data, dict):
        return None
    step = next((count for key in STEP_KEYS if (count := count_of(data.get(key))) is not None), None)
    epoch = _epoch(data) if step is None else None
    if step is None and epoch is None:
        return None
    loss = next((value for key in LOSS_KEYS if (value := float_of(data.get(key))) is not None), None)
    return LogFact(
        kind=EventKind.PROGRESS,
        pattern=pattern if step is not None else f"{pattern}_epoch",
        step=step,
        count=epoch,
        total_steps=next((count for key in TOTAL_KEYS if (count := count_of(data.get(key))) is not None), None),
        step_s=_mapped_seconds(data),
        loss=loss_in(text) if loss is None or (loss == 0.0 and GRADIENT_IS_NONE.search(text)) else loss,
        **who,
    )


def _mapped_seconds(data: dict[str, Any]) -> float | None:
    for keys, factor in ((SECONDS_KEYS, 1.0), (MILLISECONDS_KEYS, 0.001)):
        for key in keys:
            value = float_of(data.get(key))
            if value is not None:
                return factor * value
    rates = (float_of(data.get(key)) for key in RATE_KEYS)
    return next((1 / rate for rate in rates if rate), None)


def _epoch(data: dict[str, Any]) -> float | None:
    """How many epochs are done, if the mapping is about training."""
    if not any(key in data for key in TRAINING_KEYS):
        return None
    epochs = (float_of(data.get(key)) for key in EPOCH_KEYS)
    return next((epoch for epoch in epochs if epoch is not None and isfinite(epoch) and epoch >= 0), None)
