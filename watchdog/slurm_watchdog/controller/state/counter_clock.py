"""One counter of a run: what it counts, when it rose, and the steps and losses that were read of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from slurm_watchdog.analysis.memo import Series
from slurm_watchdog.controller.state.step_history import DatedLines, StepHistory
from slurm_watchdog.model.cluster_view import LossPoint, StepTime

KEPT_PACES = 200
"""Recent ones: of steps that are read every 5 s, a quarter of an hour."""
KEPT_PAUSES = 16
"""Longest ones of the run, whatever came between."""
PAUSE_KEPT_S = 86_400.0
"""A pause is remembered for a day: a data set that is read once a day may have one at its end."""
SETTLED_AFTER = 5
"""Rises of a run that teach nothing: the first steps compile and fill caches."""


@dataclass
class Paces:
    """Those of one counter."""

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_PACES))
    _pauses: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, when it was over), the longest first."""
    _seen: int = 0
    _handed_out: tuple[float, ...] | None = None

    def add(self, seconds: float, at: float, *, troubled: bool) -> None:
        """One more, that was over `at`. `troubled`: an incident was open. It then is no pace to learn from, and a
        pause all the same, for it ended by itself."""
        self._seen += 1
        if self._seen <= SETTLED_AFTER:
            return
        if len(self._pauses) < KEPT_PAUSES or seconds > self._pauses[-1][0]:
            pauses = [each for each in self._pauses if at - each[1] <= PAUSE_KEPT_S]
            self._pauses = sorted([*pauses, (seconds, at)], reverse=True)[:KEPT_PAUSES]
        if not troubled:
            self._recent.append(seconds)
            self._handed_out = None

    def recent_s(self) -> tuple[float, ...]:
        """Oldest first; the same tuple until one more is added."""
        if self._handed_out is None:
            self._handed_out = Series(self._recent)
        return self._handed_out

    def longest_s(self, now: float) -> float:
        """The longest of the last day, 0 where there was none."""
        return next((seconds for seconds, at in self._pauses if now - at <= PAUSE_KEPT_S), 0.0)


KEPT_INTERVALS = 50
"""Recent steps that the limit is learnt from."""
KEPT_TIMES = 600
"""Step times and losses that are kept for what changes slowly: at 100 s a step, most of a day."""
Counter = tuple[str, str]
"""(file, pattern)."""
KEPT_STRIDES = 16
"""Distances between lines that are kept: those of a few epochs, of which each may end with a short one."""


@dataclass
class CounterClock:
    """One counter."""

    count: float
    """What rises: the step, or another number."""
    rose_at: float
    began_at: float
    """Date of its first line."""
    first_step: int | None
    """None while only the position was seen that a bar begins at."""
    step: int
    """0 where the counter counts no steps."""
    is_step: bool = True
    seen: int = 1
    rose: int = 0
    """How often it was seen to rise."""
    stride: int = 0
    strides: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_STRIDES))
    """The recent ones: some logs have a line at the begin, in the middle and at the end of each epoch."""
    total_steps: int | None = None
    begun_anew: int = 0
    lower: float | None = None
    """A lower count that was read after the highest one: a new epoch if it continues to rise."""
    other: float | None = None
    """The newest count of what may be another program that writes the same log."""
    turns: int = 0
    """How often that one has counted on, between two counts of this one."""
    alone: int = 0
    """Counts of this one since."""
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_INTERVALS))
    """From one rise to the next, without what the log announced."""
    phase_intervals_s: dict[str, deque[float]] = field(default_factory=dict)
    """By phase: those between two rises in which the log announced an evaluation, a checkpoint, …"""
    paces: Paces = field(default_factory=Paces)
    rises: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_INTERVALS))
    """(when, step): the last of those that were read at once."""
    times: deque[StepTime] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    losses: deque[LossPoint] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    history: StepHistory = field(default_factory=StepHistory)
    lines: DatedLines = field(default_factory=DatedLines)
    consumed: float | None = None
    """Samples that the newest line says were consumed so far."""
    _handed_out: tuple[tuple[StepTime, ...], tuple[LossPoint, ...]] | None = None

    def series(self) -> tuple[tuple[StepTime, ...], tuple[LossPoint, ...]]:
        """`times` and `losses`: the same tuples until one of them grows, so that nobody judges them twice."""
        if self._handed_out is None:
            self._handed_out = Series(self.times), Series(self.losses)
        return self._handed_out

    def grew(self) -> None:
        """After anything was added to them."""
        self._handed_out = None

    @property
    def step_s(self) -> float | None:
        """Median time of one step, however many of them a report brings at once."""
        pairs = pairwise(self.rises)
        times_s = [(b_at - a_at) / (b - a) for (a_at, a), (b_at, b) in pairs if b_at > a_at and b > a]
        return median(times_s) if times_s else None
