"""What one line of a training log says. Pure: a line goes in, a fact or nothing comes out.

Only a count of steps, iterations, samples or tokens is progress. Lines that merely appear (a PULSE an hour, a retry, a
redrawn bar) are not; whether the count *rises* is for the caller to see, who knows the line before.
"""

from __future__ import annotations

import ast
import re
import warnings
from functools import lru_cache
from math import isfinite, log, nan
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.base.regex_cost import SEEN_CHARS
from slurm_watchdog.knowledge.log_signatures import (
    GUESS_NEEDLES,
    GUESSES,
    HARMLESS,
    HARMLESS_NEEDLES,
    SOURCE_LINE,
    LogTable,
    Signature,
    log_table,
)
from slurm_watchdog.knowledge.progress_patterns import (
    COUNTED,
    EPOCH_KEYS,
    GLOBAL_BATCH,
    GRADIENT_IS_NONE,
    HEARTBEAT_KEY,
    HEARTBEAT_PATTERN,
    LEFT_OUT,
    LOSS,
    LOSS_KEYS,
    MADE,
    MAPPING_NEEDLES,
    MILLISECONDS_KEYS,
    NOT_PROGRESS,
    NOT_PROGRESS_NEEDLES,
    OTHER_LABEL,
    OTHER_LOSS,
    OTHER_UNIT,
    PER_STEP,
    PREFIXES,
    PROSE,
    RATE_KEYS,
    SAMPLES_PER_SECOND,
    SECONDS_KEYS,
    SPOKEN_OF,
    SPOKEN_OF_NEEDLES,
    STEP_KEYS,
    STEP_SECONDS,
    STEPS_PER_SECOND,
    TOTAL_KEYS,
    TRAINING_KEYS,
    Pattern,
    ProgressTable,
    Sign,
    progress_table,
)
from slurm_watchdog.model.observations import EventKind

MAX_LINE = 500
"""Characters of a line that are kept as evidence."""
_MAX_PARSED = 4096
"""No framework writes what we look for further to the right; a line of megabytes must not cost seconds."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
MAX_DIGITS = 18
"""Of a whole number: what is longer counts nothing, and has no place in 64 bits (slurm_watchdog.wire.codec)."""
MOST = 2**62
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
RATE_NEEDLES = ("/s", "s/", "per_s", "per s", "per-s")
"""One of them is in each lower-cased line from whose rates the time of a step may be read."""
LONGEST_EPOCH = 1e9
"""Steps of an epoch whose length is not known: epoch and step become one number that rises."""
NO_NUMBER = ("NaN", "nan", "Inf", "inf")
"""As writers of JSON put what it has no word for."""
_NO_NUMBER = re.compile(r"(?<=[:\[,\s])(-?(?:NaN|nan|Infinity|[Ii]nf))(?=\s*[,}\]])")
_MAPPING = re.compile(r"\s*\{(?! ?[A-Za-z]+:)")
"""JSON, or a dictionary; MindFormers writes `{ Epoch:[ 1/ 2], step:[…` around its lines."""
_BEGINS = re.compile(r"\[(?:0?0:)?00:00<\?|\[(?:0?0:)?00:00, \?")
_BARS = frozenset({"tqdm", "tqdm_open", "tqdm_count"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class LogFact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a line says. A line of progress has a `step` or a `count`; both compare within one pattern only."""

    kind: EventKind
    pattern: str
    step: int | None = None
    count: float | None = None
    """Where there is no step: a number that rises and is none (epochs, tokens, samples). It is never shown or
    subtracted as a step."""
    total_steps: int | None = None
    epoch: int | None = None
    """Epochs that were finished before, of a line that counts steps within one; `in_epoch` of `epoch_steps`
    are done of this one."""
    in_epoch: int | None = None
    epoch_steps: int | None = None
    epochs: int | None = None
    """How many there are to be."""
    initial: bool = False
    """It says where a bar begins (`40/90 [00:00<?, ?it/s]`): a position, and no step that was made."""
    step_s: float | None = None
    loss: float | None = None
    phase: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None


class Rows(msgspec.Struct, frozen=True):
    """The rows of the tables that a line is tried with."""

    signatures: tuple[Signature, ...]
    signs: tuple[Sign, ...]
    patterns: tuple[Pattern, ...]
    mapping: bool
    """Whether it may be JSON, or a dictionary, with a step."""
    own: tuple[Pattern, ...] = ()
    """What a site wrote itself (see slurm_watchdog.parse.training_log.site_patterns); tried before all others."""


def all_rows() -> Rows:
    """Those in force in this process."""
    return _rows_of(log_table(), progress_table())


@lru_cache(maxsize=2)
def _rows_of(log: LogTable, progress: ProgressTable) -> Rows:
    return Rows(log.signatures, progress.signs, progress.patterns, True)


def clean_line(line: str) -> str:
    """`line` without colours and control characters, at most MAX_LINE characters."""
    return _plain(line).strip()[:MAX_LINE]


def kept_line(line: str) -> str:
    """The same with secrets masked, as a line of a log leaves the child that reads it."""
    return mask_cut(_plain(line).strip(), MAX_LINE)


def _plain(line: str) -> str:
    text = line[:_MAX_PARSED]
    if text.isprintable():  # nearly all are, and it shows quickly
        return text
    return _CONTROL.sub(" ", _ESCAPES.sub("", text))


def parse_line(line: str, rows: Rows | None = None) -> LogFact | None:
    """The fact in one line of a log (without its end), or None if it says nothing we know.

    With `rows` only those are tried: for callers who know that no other row's needle is in the line.
    """
    rows = all_rows() if rows is None else rows
    text, who = split_prefix(_plain(line))
    lower = text.lower()
    fact = _own(text, who, rows) if rows.own else None
    fact = fact or _error(text, lower, who, rows) or _sign(text, lower, who, rows)
    return fact or _progress(text, lower, who, rows)


def split_prefix(text: str) -> tuple[str, dict[str, Any]]:
    """The line without what launchers put in front, and whom that names: `rank`, `local_rank`, `host`."""
    who: dict[str, Any] = {}
    for _ in range(3):  # a host's prefix before a rank's, and no deeper
        for name, regex in PREFIXES:
            match = regex.match(text)
            if match is None:
                continue
            groups = match.groupdict()
            if (rank := _int(groups.get("rank"))) is not None:
                # `12: ` of srun may stand before a rank's own word, which knows better.
                who["rank"] = rank
            if (local := _int(groups.get("local"))) is not None:
                who["local_rank"] = local
            if groups.get("host"):
                who["host"] = groups["host"]
            text = text[match.end() :]
            if name == "rank":
                return text, who
            break
        else:
            break
    return text, who


def has_needle(needles: tuple[str, ...], lower: str) -> bool:
    """Whether one of `needles` is in the lower-cased text."""
    for needle in needles:  # noqa: SIM110 - any() takes twice as long, and this is asked a hundred times a line
        if needle in lower:
            return True
    return False


def _own(text: str, who: dict[str, Any], rows: Rows) -> LogFact | None:
    for row in rows.own:
        match = row.regex.search(text, 0, SEEN_CHARS)
        if match is None:
            continue
        groups = match.groupdict()
        step, tokens = _whole(groups.get("step")), _whole(groups.get("tokens"))
        if step is None and tokens is None:
            continue
        loss = _number(groups.get("loss") or "")
        seconds = _number(groups.get("step_seconds") or "")
        return LogFact(
            kind=EventKind.PROGRESS,
            pattern=row.name,
            step=step,
            count=None if step is not None else tokens,
            total_steps=_whole(groups.get("total")),
            step_s=_step_seconds(text) if seconds is None else seconds,
            loss=_loss(text) if loss is None else loss,
            **who,
        )
    return None


def _whole(text: str | None) -> int | None:
    """A count as people write it: 1,234 or 12_000 or 12.0."""
    value = _number(text or "")
    return _count(value) if value is not None and isfinite(value) and value >= 0 else None


def _error(text: str, lower: str, who: dict[str, Any], rows: Rows) -> LogFact | None:
    source = None
    for row in rows.signatures:
        match = row.regex.search(text) if has_needle(row.needles, lower) else None
        if match is None:
            continue
        source = bool(SOURCE_LINE.match(text)) if source is None else source
        if source:
            return None
        if not _is_guessed(text, lower, match.start()):
            if has_needle(HARMLESS_NEEDLES, lower) and HARMLESS.search(text):
                return None
            return LogFact(kind=EventKind.ERROR, pattern=row.name, **who)
    return None


def _is_guessed(text: str, lower: str, at: int) -> bool:
    """Whether what stands at this place is one of several things that a line says may have happened."""
    guess = GUESSES.search(text) if has_needle(GUESS_NEEDLES, lower) else None
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
        step=_int(match.groupdict().get("step")),
        phase=None if row.complete else row.phase,
        loss=_loss(text) if row.phase == "evaluating" else None,
        **who,
    )


def _progress(text: str, lower: str, who: dict[str, Any], rows: Rows) -> LogFact | None:
    fact = None
    if _MAPPING.match(text):
        if rows.mapping and has_needle(MAPPING_NEEDLES, lower):
            fact = _from_mapping(text.strip(), who)
    else:
        counted: bool | None = None
        for row in rows.patterns:
            if not has_needle(row.needles, lower):
                continue
            if row.counted and counted is None:
                counted = COUNTED.search(lower) is not None
            match = row.regex.search(text) if counted or not row.counted else None
            if match is not None and not _is_other(row, match, text, lower):
                fact = _from_match(row, match, text, who)
                break
    return None if fact is None or _is_no_progress(text, lower) else fact


def _is_no_progress(text: str, lower: str) -> bool:
    if has_needle(NOT_PROGRESS_NEEDLES, lower) and NOT_PROGRESS.search(text):
        return True
    for thing, phrases in SPOKEN_OF_NEEDLES.items():
        if thing in lower and has_needle(phrases, lower) and SPOKEN_OF.search(text):
            return not MADE.search(text)
    return False


def _is_other(row: Pattern, match: re.Match[str], text: str, lower: str) -> bool:
    """Whether it only looks like the row: a numbered list in prose, a bar of something else."""
    if row.counted:
        return PROSE.fullmatch(text, match.end()) is not None
    if row.name not in _BARS:
        return False
    label = lower[max(0, match.start() - MAX_LINE) : match.start()]
    if row.name == "tqdm_open":
        label = label.rpartition("|")[0]  # the bar itself stands before its numbers
    label = label.rpartition("|")[2]
    return (
        OTHER_LABEL.search(label) is not None
        or OTHER_UNIT.search(lower, match.start(), match.end() + 20) is not None
    )


def _from_match(row: Pattern, match: re.Match[str], text: str, who: dict[str, Any]) -> LogFact | None:
    groups = match.groupdict()
    if any(len(groups.get(name) or "") > MAX_DIGITS for name in WHOLE_GROUPS):
        return None
    fact = LogFact(
        kind=EventKind.PROGRESS,
        pattern=row.name,
        initial=row.name in _BARS and _BEGINS.search(text, match.start()) is not None,
        step_s=_seconds(groups, text),
        loss=_number(groups["loss"]) if groups.get("loss") else _loss(text),
        **who,
    )
    if row.in_epoch and not groups.get("updates"):
        return _fits(_in_epoch(fact, row, groups))
    step, count = _counted(groups)
    total = int(groups["total"]) if groups.get("total") and not row.in_epoch else None
    return replace(fact, step=step, count=count, total_steps=total)


def _in_epoch(fact: LogFact, row: Pattern, groups: dict[str, str | None]) -> LogFact:
    """The count begins anew with every epoch; together with the epoch it rises."""
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


def _fits(fact: LogFact) -> LogFact | None:
    """The fact, unless a product of its numbers has no place in a report."""
    return None if max(fact.step or 0, fact.total_steps or 0) >= MOST else fact


def _counted(groups: dict[str, str | None]) -> tuple[int | None, float | None]:
    """The step or, where there is none, the count."""
    number = groups.get("count") or groups.get("count_b")
    if number:
        return None, _scaled(number.rstrip("kMG"), UNITS.get(number[-1], 1.0))
    if groups.get("whole"):
        return None, int(groups.get("epoch") or 0) + int(groups["part"] or 0) / max(
            1, int(groups["whole"] or 0)
        )
    return int(groups.get("updates") or groups.get("step") or 0), None


def _seconds(groups: dict[str, str | None], text: str) -> float | None:
    """Of one step, as the line says."""
    seconds = None
    if groups.get("step_s"):
        seconds = _number(groups["step_s"] or "")
    elif groups.get("step_ms"):
        seconds = _scaled(groups["step_ms"] or "", 0.001)
    elif groups.get("rate"):
        rate = _number(groups["rate"] or "")
        seconds = 1 / rate if rate else None
    return _step_seconds(text) if seconds is None else seconds


def _from_mapping(text: str, who: dict[str, Any]) -> LogFact | None:
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
    step = next((count for key in STEP_KEYS if (count := _count(data.get(key))) is not None), None)
    epoch = _epoch(data) if step is None else None
    if step is None and epoch is None:
        return None
    loss = next((value for key in LOSS_KEYS if (value := _value(data.get(key))) is not None), None)
    return LogFact(
        kind=EventKind.PROGRESS,
        pattern=pattern if step is not None else f"{pattern}_epoch",
        step=step,
        count=epoch,
        total_steps=next((count for key in TOTAL_KEYS if (count := _count(data.get(key))) is not None), None),
        step_s=_mapped_seconds(data),
        loss=_loss(text) if loss is None or (loss == 0.0 and GRADIENT_IS_NONE.search(text)) else loss,
        **who,
    )


def _mapped_seconds(data: dict[str, Any]) -> float | None:
    for keys, factor in ((SECONDS_KEYS, 1.0), (MILLISECONDS_KEYS, 0.001)):
        for key in keys:
            value = _value(data.get(key))
            if value is not None:
                return factor * value
    rates = (_value(data.get(key)) for key in RATE_KEYS)
    return next((1 / rate for rate in rates if rate), None)


def _epoch(data: dict[str, Any]) -> float | None:
    """How many epochs are done, if the mapping is about training."""
    if not any(key in data for key in TRAINING_KEYS):
        return None
    epochs = (_value(data.get(key)) for key in EPOCH_KEYS)
    return next((epoch for epoch in epochs if epoch is not None and isfinite(epoch) and epoch >= 0), None)


def _count(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.partition("/")[0]  # "5/873"
        return _int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < MOST else None
    return value if isinstance(value, int) and 0 <= value < MOST else None


def _int(text: str | None) -> int | None:
    """The whole number that these digits are, unless they are none, or too many."""
    return int(text) if text and text.isdecimal() and len(text) <= MAX_DIGITS else None


def _value(value: object) -> float | None:
    if isinstance(value, str):
        return _number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # Python's whole numbers have no end
        return None


def _number(text: str) -> float | None:
    """What `float` makes of it: 1e999 is infinite. It raises for no length of text."""
    if "#" in text:  # 1.#QNAN, -1.#IND, 1.#INF of Windows' C library
        return nan
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None


def _scaled(text: str, factor: float) -> float | None:
    value = _number(text)
    return None if value is None else value * factor


def _loss(text: str) -> float | None:
    """The loss, NaN too where it is left out and counted, or shows only in its gradient (half precision: a
    loss of zero)."""
    lower = text.lower()
    match = LOSS.search(lower)
    if match is not None:
        loss = _number(match["loss"].rstrip(","))
        return nan if loss == 0.0 and GRADIENT_IS_NONE.search(text) else loss
    if "nan iterations" in lower and LEFT_OUT.search(lower):
        return nan
    other = OTHER_LOSS.search(lower)
    if other is None:
        return None
    value = _number(other["loss"].rstrip(","))
    if value is None or not other["log"] or not isfinite(value):
        return value
    return log(value) if value > 0 else None


def _step_seconds(text: str) -> float | None:
    lower = text.lower()
    for needle, regex in STEP_SECONDS:
        at = lower.find(needle)
        match = regex.search(lower, max(0, at - len("train_"))) if at >= 0 else None
        if match is not None:
            factor = 1000.0 if match.groupdict().get("kilo") else 1.0  # nanotron writes 1.05K for 1050
            return _scaled(match["value"], factor * (0.001 if match["unit"] == "ms" else 1.0))
    return _seconds_of_rate(lower) if has_needle(RATE_NEEDLES, lower) else None


def _seconds_of_rate(lower: str) -> float | None:
    match = PER_STEP.search(lower)
    if match is not None:
        return _scaled(match["value"], {"ms": 0.001, "us": 1e-6}.get(match["unit"], 1.0))
    match = STEPS_PER_SECOND.search(lower)
    if match is not None:
        rate = _number(match["value"] or match["named"])
        return 1 / rate if rate else None
    match, batch = SAMPLES_PER_SECOND.search(lower), GLOBAL_BATCH.search(lower)
    if match is None or batch is None:
        return None
    rate = _number((match["value"] or match["named"]).rstrip(","))
    return float(batch[1]) / rate if rate else None
