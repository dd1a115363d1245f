"""What the lines of one node's logs say, as its agent would have said it: with the site's own patterns, and
with what is learnt of a format that no one knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import isfinite

from msgspec.structs import replace

from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.progress_patterns import Pattern
from slurm_watchdog.model.observations import Event, EventKind, LogFile
from slurm_watchdog.parse.training_log.learned_format import KNOWN_AFTER, Learner
from slurm_watchdog.parse.training_log.line import Rows, all_rows, parse_line
from slurm_watchdog.parse.training_log.text import LogFact, kept_line
from slurm_watchdog.trace.records import Log

MAX_FILES = 1024  # Of one node, that are remembered at once.

Key = tuple[str, str]  # (job, stream).


GRIDS_S = (60.0, 30.0, 15.0, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Whose multiples an author, or a collector, may have rounded the times of lines to."""
EXACT_AFTER = 8
EXACT = 0.02  # Of the time between two lines: a difference of a few per cent is what is looked for in them.
READ_WITH_OTHERS = 0.25  # With so many lines as old as a look at processes or GPUs, they were dated when read.


@dataclass
class _Dates:
    """How exactly the lines of one pattern are dated, and how long the steps between them took."""

    seen: int = 0
    read_with_others: int = 0
    grid: int = 0  # The place in GRIDS_S of the coarsest one that all of them lie on; behind its end: on none.
    last: tuple[float, int] | None = None  # (time, step) of the last one that counted on.

    def step_seconds(self, t: float, step: int, with_others: bool) -> float | None:
        """The time of a step since the line before, None where that is not exact or not known."""
        self.seen += 1
        self.read_with_others += with_others
        while self.grid < len(GRIDS_S) and abs(t / GRIDS_S[self.grid] - round(t / GRIDS_S[self.grid])) > 1e-4:
            self.grid += 1
        before, self.last = self.last, (t, step)
        if before is None or step <= before[1] or t <= before[0] or self.seen < EXACT_AFTER:
            return None
        grid_s = GRIDS_S[self.grid] if self.grid < len(GRIDS_S) else 0.0
        if grid_s > EXACT * (t - before[0]) or self.read_with_others > READ_WITH_OTHERS * self.seen:
            return None
        return (t - before[0]) / (step - before[1])


@dataclass
class _File:
    last_steps: dict[str, float] = field(default_factory=dict)  # Pattern -> its last count: a bar is redrawn.
    dates: dict[str, _Dates] = field(default_factory=dict)  # By pattern.
    known: int = 0
    learner: Learner | None = field(default_factory=Learner)


@dataclass
class Logs:
    """Those of one node."""

    own: tuple[Pattern, ...] = ()
    rows: dict[Key, tuple[LogFile, float]] = field(default_factory=dict)  # As they were seen last, and when.
    _files: dict[Key, _File] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows: Rows = replace(all_rows(), own=self.own)

    def forget(self, job_id: str) -> None:
        """The run of this job is over."""
        for table in (self.rows, self._files):
            for key in [key for key in table if key[0] == job_id]:
                del table[key]

    def read(self, record: Log, now: float, sampled_at: Collection[float] = ()) -> Iterable[Event]:
        """The events in a line of this moment. `sampled_at`: when processes and GPUs were looked at in it."""
        key = str(record.job_id), record.stream or "log"
        self.rows[key] = (LogFile(job_id=key[0], path=key[1], growth_age_s=0.0), record.t)
        file = self._files.get(key)
        if file is None:
            if len(self._files) >= MAX_FILES:
                del self._files[next(iter(self._files))]
            file = self._files[key] = _File()
        for line, fact in self._facts(file, record):
            if _is_news(file, fact):
                if fact.kind is EventKind.PROGRESS and fact.step is not None and fact.step_s is None:
                    dates = file.dates.setdefault(fact.pattern, _Dates())
                    fact = replace(fact, step_s=dates.step_seconds(record.t, fact.step, record.t in sampled_at))
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
    if file.last_steps.get(fact.pattern) == number and not fact.has_own_loss:
        return False
    file.last_steps[fact.pattern] = number
    return True


def _event(key: Key, line: str, fact: LogFact, age_s: float) -> Event:
    is_no_number = fact.loss is not None and not isfinite(fact.loss)
    return picked(
        Event, fact, job_id=key[0], age_s=age_s, source=key[1], line=kept_line(line), initial=False,
        loss=None if is_no_number else fact.loss, loss_is_no_number=is_no_number,
    )  # fmt: skip
