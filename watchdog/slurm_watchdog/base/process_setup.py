"""What a process sets of itself: its name, the scheduling class SCHED_BATCH, that it ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def set_name(name: str) -> None:
    """Gives this process, and those it forks, a name of at most 15 bytes."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass  # only a name


def be_unobtrusive() -> None:
    """From now on neither this process nor those it forks takes the core from a thread that computes just
    because it woke up.

    SCHED_BATCH (see sched(7)) changes no weight: on a core that is busy we wait for the end of a slice, some
    milliseconds, and get our share. Our deadlines are seconds.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # not allowed here: the default class remains


def die_with_parent() -> None:
    """For a child, before exec: SIGTERM when we end, however that comes about (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
