"""Lines of progress of one file, folded into a row for each counter: the newest line, how many there were, and in short
those few of the others that show what a detector asks for. Pure.
"""

from __future__ import annotations

from collections import deque
from math import isfinite

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.observations import Event, EventKind, StepLine
from slurm_watchdog.parse.timestamps import stamp_of
from slurm_watchdog.parse.training_log.text import LogFact, parse_number

MAX_ROWS = 32  # Counters of one file that are open at once.
NEWEST = 3  # Lines that a row keeps: a loss is judged by so many in a row.

_BATCH = late_regex(
    r"(?:(?:global|total|effective)[ _]?(?:train[ _])?batch(?:[ _]?size)?|"
    r"(?<!micro)(?<!micro[ _])(?<![a-z])(?:batch[ _]?size|gbs))['\"]?\s*[:=]\s*(\d{1,12})"
)  # Megatron, NeMo, DeepSpeed and Composer name the size of the global batch so; others say `batch_size` or `gbs`.
_SAMPLES = late_regex(r"(?:consumed|processed|seen|total|trained)[ _]samples['\"]?\s*[:=]\s*(\d[\d,_]{0,20})")
"""What rises by a batch a step. Tokens do not: where lines are packed, each batch has another number of them."""
_SEEN_CHARS = 2000  # Of a line so much is searched for them.


def make_event(fact: LogFact, age_s: float) -> Event:
    """What a line says that was written `age_s` ago; without job and source, which the agent adds. A loss
    that is NaN or infinite has a field of its own: JSON has no word for it. The line is as it was read."""
    if fact.kind is not EventKind.PROGRESS:
        return picked(Event, fact, job_id="", source="", age_s=age_s, line=fact.text)
    lower = fact.text[:_SEEN_CHARS].lower()
    batch = _BATCH.search(lower) if "batch" in lower or "gbs" in lower else None
    newest = step_line(fact, with_samples=batch is None)
    return picked(
        Event, fact, job_id="", source="", age_s=age_s, line=fact.text, loss=newest.loss,
        loss_is_no_number=newest.loss_is_no_number, written_s=newest.written_s,
        batch=None if batch is None else int(batch[1]), samples=newest.samples,
    )  # fmt: skip


def step_line(fact: LogFact, *, with_samples: bool) -> StepLine:
    """A line of progress in short."""
    stamp = stamp_of(fact.text.lstrip()) if fact.step_s is None else None
    lower = fact.text[:_SEEN_CHARS].lower() if with_samples else ""
    samples = _SAMPLES.search(lower) if "samples" in lower else None
    loss = fact.loss if fact.loss is None or isfinite(fact.loss) else None
    return StepLine(
        _number(fact), fact.step_s, loss, loss is not fact.loss, None if stamp is None else stamp.seconds,
        None if samples is None else parse_number(samples[1]),
    )  # fmt: skip


def _number(fact: LogFact) -> float:
    """What rises: the step, or another count."""
    return (fact.count or 0.0) if fact.step is None else fact.step


class StepRow(msgspec.Struct):
    """Lines of one counter, one after the other."""

    age_s: float = 0.0
    lines: int = 0
    newest: deque[LogFact] = msgspec.field(default_factory=lambda: deque(maxlen=NEWEST))
    lowest: LogFact | None = None
    """Of the lines before the newest, the one with the lowest loss, else the first: three bad losses with a good one
    between them never look like three in a row."""
    bad_from: LogFact | None = None  # Where the losses became NaN or infinite that are still so.

    def take(self, fact: LogFact, age_s: float) -> None:
        """One line more."""
        if len(self.newest) == NEWEST and (self.lowest is None or _height(self.newest[0]) < _height(self.lowest)):
            self.lowest = self.newest[0]
        self.newest.append(fact)
        self.age_s, self.lines = age_s, self.lines + fact.stands_for
        if fact.loss is not None:
            self.bad_from = None if isfinite(fact.loss) else self.bad_from or fact

    def event(self) -> Event:
        """The row as it is reported."""
        kept = list(self.newest)
        if self.bad_from is not None and self.bad_from not in kept:
            kept.insert(0, self.bad_from)
        if self.lowest is not None and self.lowest not in kept:
            kept.insert(0, self.lowest)
        event = make_event(kept[-1], self.age_s)
        earlier = tuple(step_line(each, with_samples=event.batch is None) for each in kept[:-1])
        return (
            event if len(kept) == 1 and self.lines == 1 else replace(event, lines=max(1, self.lines), earlier=earlier)
        )


def _height(fact: LogFact) -> float:
    loss = fact.loss
    return loss if loss is not None and isfinite(loss) else float("inf")


class StepRows(msgspec.Struct):
    """The rows of one file since something else was read in it."""

    rows: dict[tuple[object, ...], StepRow] = msgspec.field(default_factory=dict)
    """The one that was added to last is the last one."""

    def add(self, fact: LogFact, age_s: float) -> list[Event]:
        """Takes one line; returns rows that it has closed. One whose count falls is another
        epoch, or another program's; ranks that write one file are at most a line behind each other."""
        key = (fact.pattern, fact.total_steps, fact.phase, fact.initial, fact.step is None)
        row, number, closed = self.rows.pop(key, None), _number(fact), list[Event]()
        if row is not None and number < _number(row.newest[-1]):
            if len(row.newest) > 1 and number == _number(row.newest[-2]):
                self.rows[key] = row
                return []
            closed, row = [row.event()], None
        row = self.rows[key] = row or StepRow()
        row.take(fact, age_s)
        return closed + (self.close() if len(self.rows) >= MAX_ROWS else [])

    def close(self) -> list[Event]:
        """All rows, in the order of their newest lines: what is read next is behind them."""
        closed = [row.event() for row in self.rows.values()]
        self.rows.clear()
        return closed
