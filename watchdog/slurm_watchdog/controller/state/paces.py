"""How long a counter took from one rise to the next while the run trained: what its own lateness is learnt from.
Pure bookkeeping.

Apart from `CounterClock.intervals_s`, which has in it what no line announced and which the limit of a job is learnt
from: a pace is training alone, from the last rise, or from the end of a checkpoint, to the next rise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slurm_watchdog.analysis.memo import Series

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
