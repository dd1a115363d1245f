"""How long steps took over a whole run, in bounded memory; and how long they took by the dates of their
lines. Pure bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from slurm_watchdog.model.cluster_view import StepTime

BLOCK = 20
"""Step times of one block at first: few enough for a job of hours, enough for a median that one pause does not move."""
MAX_BLOCKS = 256
"""Of more, each two neighbours become one, and blocks are twice as long from then on."""
SKIPPED = 3
"""First steps of a run, which compile, warm caches and fill pipelines."""
COARSE_S, FINE_S = 20.0, 0.02
"""Between two dated lines, for an error of 5 % at most: where dates have whole seconds, and where they have
thousandths."""


@dataclass
class StepHistory:
    """The median of each block of steps that can be compared: training, of one batch size, said by the log in
    one way."""

    _size: int = BLOCK
    _skipped: int = 0
    _open: list[StepTime] = field(default_factory=list)
    _blocks: list[StepTime] = field(default_factory=list)
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
        if len(self._open) >= self._size:
            self._close()

    def blocks(self) -> tuple[StepTime, ...]:
        """Those that are full, oldest first; the same tuple until one more is."""
        if self._handed_out is None:
            self._handed_out = tuple(self._blocks)
        return self._handed_out

    def _close(self) -> None:
        self._blocks.append(_middle(self._open))
        self._open, self._handed_out = [], None
        if len(self._blocks) >= MAX_BLOCKS:
            pairs = zip(self._blocks[::2], self._blocks[1::2], strict=False)
            self._blocks = [_middle([a, b]) if (a.batch, a.logged) == (b.batch, b.logged) else b for a, b in pairs]
            self._size *= 2


def _middle(times: list[StepTime]) -> StepTime:
    first = times[0]
    return StepTime(
        step=first.step, seconds=median(time.seconds for time in times), at=first.at, logged=first.logged,
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
