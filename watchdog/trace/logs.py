"""What the lines of one node's logs say, as its agent would have said it: with the site's own patterns, and with what is learnt
of a format that nobody knows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite

from msgspec.structs import replace

from watchdog.knowledge.progress_patterns import Pattern
from watchdog.learnt_progress import KNOWN_AFTER, Learner
from watchdog.model import Event, EventKind, LogFile
from watchdog.progress import ALL_ROWS, LogFact, Rows, clean_line, parse_line
from watchdog.trace.records import Log

MAX_FILES = 1024
"""Of one node, that are remembered at once."""

Key = tuple[str, str]
"""(job, stream)."""


@dataclass
class _File:
    last_steps: dict[str, float] = field(default_factory=dict)
    """Pattern -> the count that it said last: a bar that is redrawn says it again."""
    known: int = 0
    learner: Learner | None = field(default_factory=Learner)


@dataclass
class Logs:
    """Those of one node."""

    own: tuple[Pattern, ...] = ()
    rows: dict[Key, tuple[LogFile, float]] = field(default_factory=dict)
    """As they were seen last, and when."""
    _files: dict[Key, _File] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows: Rows = replace(ALL_ROWS, own=self.own)

    def forget(self, job_id: str) -> None:
        """The run of this job is over."""
        for table in (self.rows, self._files):
            for key in [key for key in table if key[0] == job_id]:
                del table[key]

    def read(self, records: Sequence[Log], now: float) -> Iterable[Event]:
        """The events in lines that came at about the same time, in their order."""
        for record in records:
            key = str(record.job_id), record.stream or "log"
            self.rows[key] = (LogFile(job_id=key[0], path=key[1], growth_age_s=0.0), record.t)
            file = self._files.get(key)
            if file is None:
                if len(self._files) >= MAX_FILES:
                    del self._files[next(iter(self._files))]
                file = self._files[key] = _File()
            for line, fact in self._facts(file, record):
                if _is_news(file, fact):
                    yield _event(key, line, fact, now - record.t)

    def _facts(self, file: _File, record: Log) -> Iterable[tuple[str, LogFact]]:
        text = (record.line or "").replace("\r", "\n")
        for line in text.split("\n"):
            fact = parse_line(line, self._rows)
            if fact is not None:
                file.known += fact.kind is EventKind.PROGRESS
                yield line, fact
        if file.learner is not None:
            if file.known >= KNOWN_AFTER:
                file.learner = None
            else:
                yield from file.learner.feed(text.encode(errors="replace"), record.t)


def _is_news(file: _File, fact: LogFact) -> bool:
    number = fact.count if fact.step is None else fact.step
    if fact.kind is not EventKind.PROGRESS or number is None:
        return True
    if file.last_steps.get(fact.pattern) == number:
        return False
    file.last_steps[fact.pattern] = number
    return True


def _event(key: Key, line: str, fact: LogFact, age_s: float) -> Event:
    is_no_number = fact.loss is not None and not isfinite(fact.loss)
    return Event(
        kind=fact.kind,
        job_id=key[0],
        age_s=age_s,
        source=key[1],
        line=clean_line(line),
        step=fact.step,
        count=fact.count,
        total_steps=fact.total_steps,
        step_s=fact.step_s,
        loss=None if is_no_number else fact.loss,
        loss_is_no_number=is_no_number,
        phase=fact.phase,
        pattern=fact.pattern,
        rank=fact.rank,
    )
