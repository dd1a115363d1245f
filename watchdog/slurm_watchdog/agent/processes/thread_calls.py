"""Reads what the kernel shows of a thread only to its owner and to tracers: its call, counters, device files. For
children: many at once. Nothing of a process's memory is in them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from slurm_watchdog.agent.children.answers import SeenThreads, ThreadFacts
from slurm_watchdog.agent.children.become_user import check_process
from slurm_watchdog.agent.children.requests import ReadThreads, WorkerState
from slurm_watchdog.agent.proc.entry import parse_stat
from slurm_watchdog.agent.proc.files import links_of, read_file
from slurm_watchdog.agent.proc.system_call import SeenCall, parse_io_bytes, see_call

DEVICES = "/dev/"


def read_threads(request: ReadThreads, state: WorkerState) -> SeenThreads:
    """What is wanted of each thread, as far as there is anything: where it has ended, may not be looked at, or is in no
    call that matters, there is not."""
    looked, found = 0, []
    with ExitStack() as stack:
        places: dict[int, int] = {}
        for what, pid, thread in state.each(request.files):
            if (facts := _read(what, pid, thread, places, stack, state)) is not None:
                found.append((looked, facts))
            looked += 1
    return SeenThreads(looked, found)


def _read(
    what: str, pid: int, thread: int, places: dict[int, int], stack: ExitStack, state: WorkerState
) -> ThreadFacts | None:
    try:
        if pid not in places:  # walking the whole path for each thread would cost a tenth more
            check_process(pid, state.own)
            places[pid] = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, places[pid])
        if what == "call":
            call = _see(thread, pid == thread, places[pid])
            return None if call is None else ThreadFacts(call=call)
        if what == "devices":
            names = set(links_of(pid, thread)[1])
            return ThreadFacts(devices=tuple(sorted(name for name in names if name.startswith(DEVICES))))
        ticks = parse_stat(read_file("../stat", places[pid])).cpu_ticks
        return ThreadFacts(ticks, parse_io_bytes(read_file("../io", places[pid])) if what == "io" else None)
    except (OSError, ValueError, IndexError):
        return None


def _see(thread: int, is_main: bool, where: int) -> SeenCall | None:
    def link(number: int) -> str | None:
        try:
            return os.readlink(f"{thread}/fd/{number}", dir_fd=where)
        except OSError:
            return None  # it was closed meanwhile

    return see_call(lambda name: read_file(f"{thread}/{name}", where), link, is_main)
