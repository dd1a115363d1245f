"""How long a process has asked the kernel to let it sleep: a retry sleeps for seconds, what sleeps for days hangs.

The time stands in the memory of the process, where its system call points to. It is read only if the thread is in this
very call, and believed only if it still is afterwards.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Final

from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.agent.proc.system_call import SystemCall, int32, parse_syscall
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.knowledge.syscalls import name_of

FOR_EVER_S: Final = 1e9
"""Of a sleep without an end, and the most that is said."""
TIMER_ABSTIME: Final = 1  # linux/time.h
CLOCKS: Final = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC)
TIMES_OF_SELECT: Final = {"select": 1e-6, "pselect6": 1e-9}
"""Call -> unit of the second number of its timeout (timeval, timespec), in seconds. Of no descriptors it is a sleep:
that of Python up to 3.10."""
_TWO_NUMBERS: Final = struct.Struct("=qq")  # struct timespec and struct timeval of 64-bit machines


def read_sleep_s(pid: int) -> float | None:
    """Seconds after which the main thread of `pid` wakes by itself: exact where it has said until when, else counted
    from the beginning of its sleep. None: it does not sleep, or that cannot be known."""
    try:
        line = read_file(f"/proc/{pid}/task/{pid}/syscall")
        call = parse_syscall(line)
        if call is None or call.number < 0:
            return None
        seconds = _asked_s(pid, call, name_of(call.number, os.uname().machine))
        same = read_file(f"/proc/{pid}/task/{pid}/syscall") == line
    except (OSError, ValueError, struct.error):
        return None
    return min(max(0.0, seconds), FOR_EVER_S) if seconds is not None and same else None


def _asked_s(pid: int, call: SystemCall, name: str) -> float | None:
    if name == "pause":
        return FOR_EVER_S
    if name == "nanosleep":
        return _read_s(pid, call.args[0])
    if name == "clock_nanosleep":
        clock, absolute = int32(call.args[0]), call.args[1] & TIMER_ABSTIME
        if clock not in CLOCKS:
            return None
        return _read_s(pid, call.args[2]) - (time.clock_gettime(clock) if absolute else 0.0)
    if name in TIMES_OF_SELECT and call.args[0] == 0:
        return _read_s(pid, call.args[4], TIMES_OF_SELECT[name]) if call.args[4] else FOR_EVER_S
    return None


def _read_s(pid: int, pointer: int, unit_s: float = 1e-9) -> float:
    """The time at `pointer` in the memory of `pid`. Raises OSError and struct.error."""
    with opened(f"/proc/{pid}/mem", os.O_RDONLY) as fd:
        seconds, rest = _TWO_NUMBERS.unpack(os.pread(fd, _TWO_NUMBERS.size, pointer))
    return float(seconds + rest * unit_s)
