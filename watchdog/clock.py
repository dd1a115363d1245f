"""The only module that reads time. Everything else is given `now`, so that a test can be in the middle of next week."""

from __future__ import annotations

import time


def monotonic() -> float:
    """Seconds on a clock that never goes back; its zero means nothing. For windows, ages and deadlines."""
    return time.monotonic()


def wall() -> float:
    """Seconds since the epoch, for people and for comparing with the times of files. Never for windows."""
    return time.time()
