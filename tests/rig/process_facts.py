"""What /proc says of processes that the rig has started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on, None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def start_time_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its pid, its identity. None if it is gone or a zombie."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def all_pids() -> list[int]:
    """Every process id that this /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """The children of the main thread of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Keep SIGINT and SIGTERM until the end of the block, so that a second Ctrl-C does not stop the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in old:
            signal.signal(number, lambda got, _: arrived.append(got))
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for first in arrived[:1]:
            os.kill(os.getpid(), first)
