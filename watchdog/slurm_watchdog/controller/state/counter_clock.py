"""One counter of a run: what it counts, when it rose, and the steps and losses that were read of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from slurm_watchdog.base.averages import median, midmean
from slurm_watchdog.base.memo import Series
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.cluster_view import LossPoint, StepTime

BLOCK, BLOCK_S = 20, 15.0
"""Step times of one block, and how long they take together, at least: few enough for a job of hours, enough for
a mean that pauses do not move, and where steps are short, half an hour of full resolution."""
LEVEL_BLOCKS = 128
"""Of more blocks of one length, the two oldest become one of twice the length: what was an hour ago is known to
the minute, what was a month ago to some hours (the exponential histogram of M. Datar, A. Gionis, P. Indyk and
R. Motwani, "Maintaining stream statistics over sliding windows", 2002)."""
SKIPPED = 3  # First steps of a run, which compile, warm caches and fill pipelines.
COARSE_S, FINE_S = 20.0, 0.02  # Between dated lines, for 5 % at most: dates of whole seconds, of thousandths.


@dataclass
class StepHistory:
    """The interquartile mean of each block of steps that can be compared: training, of one batch size, said by the
    log in one way."""

    _skipped: int = 0
    _open: list[StepTime] = field(default_factory=list)
    _levels: list[deque[StepTime]] = field(default_factory=list)  # Shortest blocks first; in each, the oldest first.
    _handed_out: tuple[StepTime, ...] | None = None

    def add(self, time: StepTime) -> None:
        """Takes the next one of the run."""
        if self._skipped < SKIPPED:
            self._skipped += 1
            return
        if time.phase is not None or time.seconds <= 0:
            return
        if self._open and (self._open[0].batch, self._open[0].logged) != (time.batch, time.logged):
            self._open = []
        self._open.append(time)
        if len(self._open) >= BLOCK and time.at - self._open[0].at >= BLOCK_S:
            self._close()

    def blocks(self) -> tuple[StepTime, ...]:
        """Those that are full, oldest first; the same tuple until one more is."""
        if self._handed_out is None:
            self._handed_out = Series(block for level in reversed(self._levels) for block in level)
        return self._handed_out

    def _close(self) -> None:
        block: StepTime | None = _middle(self._open)
        self._open, self._handed_out = [], None
        for level in self._levels:
            if block is None:
                return
            level.append(block)
            block = None
            if len(level) > LEVEL_BLOCKS:
                first, second = level.popleft(), level.popleft()
                same = (first.batch, first.logged) == (second.batch, second.logged)
                block = _middle([first, second]) if same else second
        if block is not None:
            self._levels.append(deque([block]))


def _middle(times: list[StepTime]) -> StepTime:
    first = times[0]
    seconds = midmean([time.seconds for time in times])
    return picked(StepTime, first, "step", "at", "logged", "batch", seconds=seconds)


@dataclass
class DatedLines:
    """Step times from the dates of the lines that say the step, over so many lines that the dates are exact enough."""

    _from: tuple[int, float] | None = None  # (step, its line's date).

    def step_seconds(self, step: int, written_s: float, other: bool) -> float | None:
        """The line of `step` was written at `written_s`; `other`: something else than training lies between
        it and the last one. Returns the seconds a step since the last time that anything was returned, None
        while that is too short to be exact."""
        if self._from is None or other or step <= self._from[0] or written_s < self._from[1]:
            self._from = (step, written_s)
            return None
        steps, seconds = step - self._from[0], written_s - self._from[1]
        whole = written_s.is_integer() and self._from[1].is_integer()
        if seconds < (COARSE_S if whole else FINE_S):
            return None
        self._from = (step, written_s)
        return seconds / steps


KEPT_PACES = 200  # Recent ones: of steps that are read every 5 s, a quarter of an hour.
KEPT_PAUSES = 16  # Longest ones of the run, whatever came between.
PAUSE_KEPT_S = 86_400.0  # A pause is remembered for a day: a data set that is read once a day may have one at its end.
SETTLED_AFTER = 5  # Rises of a run that teach nothing: the first steps compile and fill caches.


@dataclass
class Paces:
    """Those of one counter."""

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_PACES))
    _pauses: list[tuple[float, float]] = field(default_factory=list)  # (seconds, when it was over), the longest first.
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


KEPT_INTERVALS = 50  # Recent steps that the limit is learnt from.
KEPT_TIMES = 600  # Step times and losses that are kept for what changes slowly: at 100 s a step, most of a day.
Counter = tuple[str, str]  # (file, pattern).
KEPT_STRIDES = 16  # Distances between lines: of a few epochs, each of which may end with a short one.


@dataclass
class CounterClock:
    """One counter."""

    count: float  # What rises: the step, or another number.
    rose_at: float
    began_at: float  # Date of its first line.
    first_step: int | None  # None while only the position was seen that a bar begins at.
    step: int  # 0 where the counter counts no steps.
    is_step: bool = True
    seen: int = 1
    rose: int = 0  # How often it was seen to rise.
    stride: int = 0
    strides: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_STRIDES))
    """The recent ones: some logs have a line at the begin, in the middle and at the end of each epoch."""
    total_steps: int | None = None
    begun_anew: int = 0
    lower: float | None = None  # A lower count that was read after the highest: a new epoch if it rises on.
    other: float | None = None  # The newest count of what may be another program that writes the same log.
    turns: int = 0  # How often that one has counted on, between two counts of this one.
    alone: int = 0  # Counts of this one since.
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
    consumed: float | None = None  # Samples that the newest line says were consumed so far.
    _handed_out: tuple[tuple[StepTime, ...], tuple[LossPoint, ...]] | None = None

    def series(self) -> tuple[tuple[StepTime, ...], tuple[LossPoint, ...]]:
        """`times` and `losses`: the same tuples until one of them grows, so that no one judges them twice."""
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
