"""What one line of a training log says. Pure: a line goes in, a fact or nothing comes out.

Only a count of steps, iterations, samples or tokens is progress. Lines that merely appear (a PULSE an hour, a retry, a
redrawn bar) are not; whether the count *rises* is for the caller to see, who knows the line before.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from math import isfinite, log, nan
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.regex_cost import SEEN_CHARS
from slurm_watchdog.knowledge import log_signatures as errors
from slurm_watchdog.knowledge import progress_patterns as known
from slurm_watchdog.knowledge.log_signatures import LogTable, Signature, log_table
from slurm_watchdog.knowledge.progress_patterns import Pattern, ProgressTable, Sign, progress_table
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log import text as written
from slurm_watchdog.parse.training_log.text import LogFact, has_needle, plain_line, split_prefix

_T = TypeVar("_T")

# The loss and the time of a step, whichever row matches.
RATE_NEEDLES = ("/s", "s/", "per_s", "per s", "per-s")
"""One of them is in each lower-cased line from whose rates the time of a step may be read."""


def loss_in(text: str) -> float | None:
    """The loss; NaN where it is left out and counted, or shows in its gradient alone (half precision: a loss of 0)."""
    lower = text.lower()
    match = known.LOSS.search(lower)
    if match is not None:
        loss = written.parse_number(match["loss"].rstrip(","))
        return nan if loss == 0.0 and known.GRADIENT_IS_NONE.search(text) else loss
    if "nan iterations" in lower and known.LEFT_OUT.search(lower):
        return nan
    other = known.OTHER_LOSS.search(lower)
    if other is None:
        return None
    value = written.parse_number(other["loss"].rstrip(","))
    if value is None or not other["log"] or not isfinite(value):
        return value
    return log(value) if value > 0 else None


def step_seconds_in(text: str) -> float | None:
    """Seconds of one step, as the line gives them, or from its rate and batch; None if it gives none."""
    lower = text.lower()
    for needle, regex in known.STEP_SECONDS:
        at = lower.find(needle)
        match = regex.search(lower, max(0, at - len("train_"))) if at >= 0 else None
        if match is not None:
            factor = 1000.0 if match.groupdict().get("kilo") else 1.0  # nanotron writes 1.05K for 1050
            return written.scaled(match["value"], factor * (0.001 if match["unit"] == "ms" else 1.0))
    return _seconds_of_rate(lower) if has_needle(RATE_NEEDLES, lower) else None


def _seconds_of_rate(lower: str) -> float | None:
    match = known.PER_STEP.search(lower)
    if match is not None:
        return written.scaled(match["value"], {"ms": 0.001, "us": 1e-6}.get(match["unit"], 1.0))
    match = known.STEPS_PER_SECOND.search(lower)
    if match is not None:
        rate = written.parse_number(match["value"] or match["named"])
        return 1 / rate if rate else None
    match, batch = known.SAMPLES_PER_SECOND.search(lower), known.GLOBAL_BATCH.search(lower)
    if match is None or batch is None:
        return None
    rate = written.parse_number((match["value"] or match["named"]).rstrip(","))
    return float(batch[1]) / rate if rate else None


NO_NUMBER = ("NaN", "nan", "Inf", "inf")  # As writers of JSON put what it has no word for.
_NO_NUMBER = late_regex(r"(?<=[:\[,\s])(-?(?:NaN|nan|Infinity|[Ii]nf))(?=\s*[,}\]])")
MAPPING = late_regex(r"\s*\{(?! ?[A-Za-z]+:)")
"""JSON, or a dictionary; MindFormers writes `{ Epoch:[ 1/ 2], step:[…` around its lines."""


def from_mapping(text: str, who: dict[str, Any]) -> LogFact | None:
    """A line of JSON, or a Python dictionary as the Hugging Face Trainer prints it: progress if it has a step."""
    pattern = known.HEARTBEAT_PATTERN if known.HEARTBEAT_KEY in text else "json"
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
    step = _first(data, known.STEP_KEYS, written.count_of)
    epoch = _epoch(data) if step is None else None
    if step is None and epoch is None:
        return None
    loss = _first(data, known.LOSS_KEYS, written.float_of)
    return LogFact(
        kind=EventKind.PROGRESS,
        pattern=pattern if step is not None else f"{pattern}_epoch",
        step=step,
        count=epoch,
        total_steps=_first(data, known.TOTAL_KEYS, written.count_of),
        step_s=_mapped_seconds(data),
        loss=loss_in(text) if loss is None or (loss == 0.0 and known.GRADIENT_IS_NONE.search(text)) else loss,
        **who,
    )


def _first(data: dict[str, Any], keys: tuple[str, ...], read: Callable[[object], _T | None]) -> _T | None:
    """What is read under the first of the keys that has it."""
    return next((value for key in keys if key in data and (value := read(data[key])) is not None), None)


def _mapped_seconds(data: dict[str, Any]) -> float | None:
    for keys, factor in ((known.SECONDS_KEYS, 1.0), (known.MILLISECONDS_KEYS, 0.001)):
        if (value := _first(data, keys, written.float_of)) is not None:
            return factor * value
    rate = _first(data, known.RATE_KEYS, lambda value: written.float_of(value) or None)
    return None if rate is None else 1 / rate


def _epoch(data: dict[str, Any]) -> float | None:
    if not any(key in data for key in known.TRAINING_KEYS):
        return None
    epochs = (written.float_of(data.get(key)) for key in known.EPOCH_KEYS)
    return next((epoch for epoch in epochs if epoch is not None and isfinite(epoch) and epoch >= 0), None)


LONGEST_EPOCH = 1e9  # Steps of an epoch whose length is not known: epoch and step become one number that rises.
_BAR_BEGINS = late_regex(r"\[(?:0?0:)?00:00<\?|\[(?:0?0:)?00:00, \?")
_BARS = frozenset({"tqdm", "tqdm_open", "tqdm_count"})
_EPOCHS = frozenset({"epoch_pair", "epoch_loss", "pair_loss"})


class Rows(msgspec.Struct, frozen=True):
    """The rows of the tables that a line is tried with."""

    signatures: tuple[Signature, ...]
    signs: tuple[Sign, ...]
    patterns: tuple[Pattern, ...]
    mapping: bool  # Whether it may be JSON, or a dictionary, with a step.
    own: tuple[Pattern, ...] = ()
    """What a site wrote itself (see slurm_watchdog.parse.training_log.site_patterns); tried before all others."""
    doubts: tuple[str, ...] | None = None
    """Of the words by which a count is no progress those that it may hold; None: all."""


def all_rows() -> Rows:
    """Those in force in this process."""
    return _rows_of(log_table(), progress_table())


@lru_cache(maxsize=2)
def _rows_of(log: LogTable, progress: ProgressTable) -> Rows:
    return Rows(log.signatures, progress.signs, progress.patterns, True)


def parse_line(line: str, rows: Rows | None = None, last: Pattern | None = None) -> LogFact | None:
    """The fact in one line of a log (without its end), or None if it says nothing we know.

    With `rows` only those are tried: for callers who know that no other row's needle is in the line. `last`: the
    pattern of progress that matched the line before that is like this one; it is tried first.
    """
    rows = all_rows() if rows is None else rows
    text, who = split_prefix(plain_line(line))
    lower = text.lower()
    fact = _own(text, who, rows) if rows.own else None
    fact = fact or _error(text, lower, who, rows) or _sign(text, lower, who, rows)
    fact = fact or _progress(text, lower, who, rows, last)
    return None if fact is None else replace(fact, text=line)


def _own(text: str, who: dict[str, Any], rows: Rows) -> LogFact | None:
    for row in rows.own:
        match = row.regex.search(text, 0, SEEN_CHARS)
        if match is None:
            continue
        groups = match.groupdict()
        step, tokens = written.written_count(groups.get("step")), written.written_count(groups.get("tokens"))
        if step is None and tokens is None:
            continue
        loss = written.parse_number(groups.get("loss") or "")
        seconds = written.parse_number(groups.get("step_seconds") or "")
        return LogFact(
            kind=EventKind.PROGRESS,
            pattern=row.name,
            step=step,
            count=None if step is not None else tokens,
            total_steps=written.written_count(groups.get("total")),
            step_s=step_seconds_in(text) if seconds is None else seconds,
            loss=loss_in(text) if loss is None else loss,
            **who,
        )
    return None


def _error(text: str, lower: str, who: dict[str, Any], rows: Rows) -> LogFact | None:
    source = None
    for row in rows.signatures:
        match = row.regex.search(text) if has_needle(row.needles, lower) else None
        if match is None:
            continue
        source = bool(errors.SOURCE_LINE.match(text)) if source is None else source
        if source:
            return None
        if errors.is_spoken_of(text, match.start(), match.end()) or (row.consequence and errors.COPYING.match(text)):
            continue
        if not _is_guessed(text, lower, match.start()):
            if has_needle(errors.HARMLESS_NEEDLES, lower) and errors.HARMLESS.search(text):
                return None
            return LogFact(kind=EventKind.ERROR, pattern=row.name, **who)
    return None


def _is_guessed(text: str, lower: str, at: int) -> bool:
    """Whether what stands at this place is one of several things that a line says may have happened."""
    guess = errors.GUESSES.search(text) if has_needle(errors.GUESS_NEEDLES, lower) else None
    return guess is not None and guess.start() <= at


def _sign(text: str, lower: str, who: dict[str, Any], rows: Rows) -> LogFact | None:
    for row in rows.signs:
        match = row.regex.search(text) if has_needle(row.needles, lower) else None
        if match is not None:
            return _from_sign(row, match, text, who)
    return None


def _from_sign(row: Sign, match: re.Match[str], text: str, who: dict[str, Any]) -> LogFact:
    return LogFact(
        kind=EventKind.CHECKPOINT if row.complete else EventKind.PHASE,
        pattern=row.name,
        step=written.whole_number(match.groupdict().get("step")),
        phase=None if row.complete else row.phase,
        loss=loss_in(text) if row.phase == "evaluating" else None,
        **who,
    )


def _progress(text: str, lower: str, who: dict[str, Any], rows: Rows, last: Pattern | None) -> LogFact | None:
    fact = None
    if MAPPING.match(text):
        if rows.mapping and has_needle(known.MAPPING_NEEDLES, lower):
            fact = from_mapping(text.strip(), who)
    else:
        counted: bool | None = None
        for row in rows.patterns if last is None else (last, *rows.patterns):
            if not has_needle(row.needles, lower):
                continue
            if row.counted and counted is None:
                counted = known.COUNTED.search(lower) is not None
            match = row.regex.search(text) if counted or not row.counted else None
            if match is not None and not _is_other(row, match, text, lower):
                fact = _from_match(row, match, text, who)
                break
    if fact is None or (rows.doubts is not None and not has_needle(rows.doubts, lower)):
        return fact
    return None if _is_no_progress(text, lower) else fact


def _is_no_progress(text: str, lower: str) -> bool:
    if has_needle(known.NOT_PROGRESS_NEEDLES, lower) and known.NOT_PROGRESS.search(text):
        return True
    for thing, phrases in known.SPOKEN_OF_NEEDLES.items():
        if thing in lower and has_needle(phrases, lower) and known.SPOKEN_OF.search(text):
            return not known.MADE.search(text)
    return False


def _is_other(row: Pattern, match: re.Match[str], text: str, lower: str) -> bool:
    """Whether it only looks like the row: a numbered list in prose, a bar of something else."""
    if row.counted:
        return known.PROSE.fullmatch(text, match.end()) is not None
    if row.name in _EPOCHS:
        return known.OTHER_EPOCH.search(lower, 0, match.start()) is not None
    if row.name not in _BARS:
        return False
    label = lower[max(0, match.start() - written.MAX_LINE) : match.start()]
    if row.name == "tqdm_open":
        label = label.rpartition("|")[0]  # the bar itself stands before its numbers
    label = label.rpartition("|")[2]
    other = known.OTHER_LABEL.search(label) or known.OTHER_UNIT.search(lower, match.start(), match.end() + 20)
    return other is not None


def _from_match(row: Pattern, match: re.Match[str], text: str, who: dict[str, Any]) -> LogFact | None:
    groups = match.groupdict()
    for name, found in groups.items():
        if found is not None and len(found) > written.MAX_DIGITS and name in WHOLE_GROUPS:
            return None
    fact = LogFact(
        kind=EventKind.PROGRESS,
        pattern=row.name,
        initial=row.name in _BARS and _BAR_BEGINS.search(text, match.start()) is not None,
        step_s=_step_seconds(groups, text),
        loss=written.parse_number(groups["loss"]) if groups.get("loss") else loss_in(text),
        **who,
    )
    if row.in_epoch and not groups.get("updates"):
        fact = _in_epoch(fact, row, groups)
        # A product of its numbers may have no place in a report.
        return None if max(fact.step or 0, fact.total_steps or 0) >= written.MAX_WHOLE else fact
    step, count = _counted(groups)
    total = int(groups["total"]) if groups.get("total") and not row.in_epoch else None
    return replace(fact, step=step, count=count, total_steps=total)


def _in_epoch(fact: LogFact, row: Pattern, groups: dict[str, str | None]) -> LogFact:
    """The count starts again with every epoch; together with the epoch it rises."""
    epoch = max(0, int(groups["epoch"] or 0) - row.first_epoch)
    step = int(groups["step"] or 0)
    if not groups.get("total"):
        return replace(fact, count=epoch + min(step / LONGEST_EPOCH, 0.999), epoch=epoch, in_epoch=step)
    steps = int(groups["total"] or 0)
    epochs = int(groups.get("epochs") or 0) or None
    return replace(
        fact,
        step=step + epoch * steps,
        epoch=epoch,
        in_epoch=step,
        epoch_steps=steps,
        epochs=epochs,
        total_steps=epochs * steps if epochs and epochs > epoch and step <= steps else None,
    )


WHOLE_GROUPS = ("step", "total", "epoch", "epochs", "updates", "part", "whole")
"""Groups of PATTERNS that are whole numbers."""


def _counted(groups: dict[str, str | None]) -> tuple[int | None, float | None]:
    number = groups.get("count") or groups.get("count_b")
    if number:
        return None, written.scaled(number.rstrip("kMG"), written.UNITS.get(number[-1], 1.0))
    if groups.get("whole"):
        return None, int(groups.get("epoch") or 0) + int(groups["part"] or 0) / max(1, int(groups["whole"] or 0))
    return int(groups.get("updates") or groups.get("step") or 0), None


def _step_seconds(groups: dict[str, str | None], text: str) -> float | None:
    seconds = None
    if groups.get("step_s"):
        seconds = written.parse_number(groups["step_s"] or "")
    elif groups.get("step_ms"):
        seconds = written.scaled(groups["step_ms"] or "", 0.001)
    elif groups.get("rate"):
        rate = written.parse_number(groups["rate"] or "")
        seconds = 1 / rate if rate else None
    return step_seconds_in(text) if seconds is None else seconds
