"""The only module that reads time. Everything else is given `now`, so that a test can be in the middle of next week."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_monotonic: Callable[[], float] = time.monotonic
_wall: Callable[[], float] = time.time


def monotonic() -> float:
    """Seconds on a clock that never goes back; its zero means nothing. For windows, ages and deadlines."""
    return _monotonic()


def since_boot() -> float:
    """Seconds since the kernel started, a suspension of the machine included: the same for each process there."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall() -> float:
    """Seconds since the epoch, for people and for comparing with the times of files. Never for windows."""
    return _wall()


def thread_cpu() -> float:
    """Seconds of processor time that this thread has taken; real in a simulation, too."""
    return time.thread_time()


@contextmanager
def simulated(monotonic: Callable[[], float], wall: Callable[[], float]) -> Iterator[None]:
    """Inside it, everybody in this process lives by these two clocks: for the simulator."""
    global _monotonic, _wall
    before = _monotonic, _wall
    _monotonic, _wall = monotonic, wall
    try:
        yield
    finally:
        _monotonic, _wall = before
