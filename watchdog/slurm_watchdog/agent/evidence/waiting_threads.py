"""What the threads of a process other than its main one wait for, those of compiled code included: py-spy shows
the others only."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import Final

from slurm_watchdog.agent.proc.files import read_call_name, read_stat
from slurm_watchdog.model.evidence import WaitingThreads

MAX_THREADS: Final = 256
"""More are not looked at, and then nothing is said: 15 µs each."""

LOOKS: Final = 3
"""A thread may wake between the reading of its state and that of its system call."""


def waiting_threads(pid: int) -> tuple[WaitingThreads, ...] | None:
    """Of the process `pid`, counted by name, state and system call. None where that cannot be known of all."""
    try:
        numbers = [name for name in os.listdir(f"/proc/{pid}/task") if name != str(pid)]
    except OSError:
        return None
    if len(numbers) > MAX_THREADS:
        return None
    found: Counter[tuple[str, str, str]] = Counter()
    for number in numbers:
        with suppress(OSError, ValueError):  # it has ended meanwhile
            for _ in range(LOOKS):
                stat = read_stat(f"{pid}/task/{number}")
                call = read_call_name(f"/proc/{pid}/task/{number}")
                if call is not None or stat.state == "R":
                    break
            else:
                return None
            found[stat.comm, stat.state, call or ""] += 1
    rows = sorted(found.items())
    return tuple(WaitingThreads(name=name, state=state, call=call, threads=n) for (name, state, call), n in rows)
