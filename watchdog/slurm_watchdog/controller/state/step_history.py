"""How long steps took over a whole run, in bounded memory; and how long they took by the dates of their
lines. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slurm_watchdog.analysis.memo import Series
from slurm_watchdog.base.midmean import midmean
from slurm_watchdog.model.cluster_view import StepTime

BLOCK, BLOCK_S = 20, 15.0
"""Step times of one block, and how long they take together, at least: few enough for a job of hours, enough for
a mean that pauses do not move, and where steps are short, half an hour of full resolution."""
LEVEL_BLOCKS = 128
"""Of more blocks of one length, the two oldest become one of twice the length: what was an hour ago is known to
the minute, what was a month ago to some hours (the exponential histogram of M. Datar, A. Gionis, P. Indyk and
R. Motwani, "Maintaining stream statistics over sliding windows", 2002)."""
SKIPPED = 3
"""First steps of a run, which compile, warm caches and fill pipelines."""
COARSE_S, FINE_S = 20.0, 0.02
"""Between two dated lines, for an error of 5 % at most: where dates have whole seconds, and where they have
thousandths."""


@dataclass
class StepHistory:
    """The interquartile mean of each block of steps that can be compared: training, of one batch size, said by the
    log in one way."""

    _skipped: int = 0
    _open: list[StepTime] = field(default_factory=list)
    _levels: list[deque[StepTime]] = field(default_factory=list)
    """Blocks of the shortest length first; in each, the oldest first."""
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
    return StepTime(
        step=first.step, seconds=midmean([time.seconds for time in times]), at=first.at, logged=first.logged,
        batch=first.batch,
    )  # fmt: skip


@dataclass
class DatedLines:
    """Step times from the dates of the lines that say the step, over so many lines that the dates are exact enough."""

    _from: tuple[int, float] | None = None
    """(step, its line's date)."""

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
