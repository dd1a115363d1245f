"""What a child that works on users' data may use: CPU time for one request, address space, no core file.

A parser that meets hostile data ends with a reason, not with a core that spins or a unit that is out of
memory. Three steps: an exception when the budget is spent, the kernel's signal where no Python code gets its
turn, and the limit of the address space.
"""

from __future__ import annotations

import math
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

CPU_S = 5.0
"""Of CPU time for one request: half of the usual deadline (agent.probe_deadline), and a hundred times what
the longest look takes."""
CPU_OF_S: Mapping[str, float] = {"dump_stacks": 20.0, "read_gpus": 60.0}
"""64 processes with 4 MiB of JSON each; NVML, whose driver may spend seconds in its first answer, and which
parses no one's data."""
KILLED_AFTER_S = 5.0  # More of CPU time before the kernel kills a child in which the exception did not come through.
ADDRESS_SPACE = 256 << 20
"""Bytes beyond what the child has when it starts: a look takes some 10 MiB, the largest answer
(probe_child.MAX_FRAME) some 100."""
UNLIMITED = frozenset({"read_gpus"})  # Driver libraries map address space as they like, and read no user's data.


class CpuSpentError(BaseException):
    """The CPU time of one request is spent, as its text says. No Exception: what a function forgives does not
    include this."""


def forbid_core_files() -> None:
    """This process and what it starts leave no core file: it would hold other users' data."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_address_space(room: int = ADDRESS_SPACE) -> None:
    """From now on at most `room` bytes more than this process has mapped now. Where that is not known nothing
    changes."""
    with suppress(ValueError, OSError, IndexError):
        with open("/proc/self/statm", "rb") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = mapped + room
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


@contextmanager
def cpu_budget(seconds: float) -> Iterator[None]:
    """Raises CpuSpentError in the block once this process has used so much CPU time in it, again each second
    after that; the kernel kills a process that continues for KILLED_AFTER_S more."""

    def spent(number: int, frame: FrameType | None) -> None:
        raise CpuSpentError(f"given up after {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, spent)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    killed_at = math.ceil(usage.ru_utime + usage.ru_stime + seconds + KILLED_AFTER_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_CPU, (killed_at if hard == resource.RLIM_INFINITY else min(killed_at, hard), hard)
        )
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
