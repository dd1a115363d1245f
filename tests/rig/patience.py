"""How long to wait on a machine that others use as well: a limit in seconds of an idle machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST = 10.0
"""A limit grows to at most ten times its length: what takes longer than that is broken, not slow."""


def busyness() -> float:
    """How many threads want each processor, from 1 to MOST: the larger of the last minute's mean and of this moment."""
    words = Path("/proc/loadavg").read_text().split()
    runnable = max(float(words[0]), int(words[3].partition("/")[0]) - 1)  # one of them reads this file
    return min(MOST, max(1.0, runnable / (os.cpu_count() or 1)))


class Patience:
    """A limit of `seconds` that runs slower while the machine is busy, and always where what is waited for takes `pace`
    times as long."""

    def __init__(self, seconds: float, pace: float = 1.0) -> None:
        self._left_s, self._looked_at, self._pace = seconds, time.monotonic(), pace

    def lasts(self) -> bool:
        """Whether some of it is left."""
        now = time.monotonic()
        self._left_s -= (now - self._looked_at) / max(self._pace, busyness())
        self._looked_at = now
        return self._left_s > 0
