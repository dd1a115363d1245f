"""Reads what the kernel shows of a thread only to its owner and to tracers: its call, counters, device files. For
children: many at once. Nothing of a process's memory is in them.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from slurm_watchdog.agent.children.answers import OpenDevices, ThreadCall, ThreadFacts
from slurm_watchdog.agent.children.become_user import check_process
from slurm_watchdog.agent.children.requests import ReadThreads, WorkerState
from slurm_watchdog.agent.proc.entry import parse_stat
from slurm_watchdog.agent.proc.files import links_of, read_file
from slurm_watchdog.agent.proc.system_call import int32, parse_syscall
from slurm_watchdog.knowledge.syscalls import FD_ARGUMENT, idle_numbers, name_of

DEVICES = "/dev/"
_MACHINE = os.uname().machine
_IDLE = idle_numbers(_MACHINE)


def read_threads(request: ReadThreads, state: WorkerState) -> list[ThreadFacts | None]:
    """What is wanted of each thread, None where it has ended or may not be looked at."""
    with ExitStack() as stack:
        places: dict[int, int] = {}
        return [_read(what, pid, thread, places, stack, state) for what, pid, thread in state.each(request.files)]


def _read(
    what: str, pid: int, thread: int, places: dict[int, int], stack: ExitStack, state: WorkerState
) -> ThreadFacts | None:
    try:
        if pid not in places:  # walking the whole path for each thread would cost a tenth more
            check_process(pid, state.own)
            places[pid] = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, places[pid])
        if what == "call":
            return ThreadFacts(call=_call(pid, thread, places[pid]))
        if what in ("io", "cpu"):
            ticks = parse_stat(read_file("../stat", places[pid])).cpu_ticks
            return ThreadFacts(io=_text("../io", places[pid]) if what == "io" else None, cpu_ticks=ticks)
        count, names = links_of(pid, thread)
        devices = sorted({name for name in names if name.startswith(DEVICES)})
        return ThreadFacts(devices=OpenDevices(count, tuple(devices)))
    except (OSError, ValueError, IndexError):
        return None


def _text(path: str, where: int) -> str:
    return read_file(path, where).decode("latin-1")


def _call(pid: int, thread: int, where: int) -> ThreadCall:
    line = _text(f"{thread}/syscall", where)
    idle = line.split(" ", 1)[0].encode() in _IDLE
    if idle and pid != thread:
        return ThreadCall(line)  # most threads, most of the time
    stat = _text(f"{thread}/stat", where)
    call = parse_syscall(line.encode("latin-1"))
    if call is None or (idle and parse_stat(stat.encode("latin-1")).state != "D"):
        return ThreadCall(line)
    name = name_of(call.number, _MACHINE) if call.number >= 0 else None
    link = None
    if name in FD_ARGUMENT:
        try:
            link = os.readlink(f"{thread}/fd/{int32(call.args[FD_ARGUMENT[name]])}", dir_fd=where)
        except OSError:
            pass  # it was closed meanwhile
    status, wchan, io = (_text(f"{thread}/{each}", where) for each in ("status", "wchan", "io"))
    return ThreadCall(line, stat, status, wchan, io, link)
