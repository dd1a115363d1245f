"""What the kernel says of threads only to their owner, and to whoever may trace everybody: read in the child `look`.

An agent with that right reads these small files in its loop, where they cannot hang (see process_table); one
without asks for many at
once. Nothing of a process's memory is in them: the call it stands in, what it waits for, its counters, names
of open files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from slurm_watchdog.agent.proc.system_call import parse_syscall
from slurm_watchdog.agent.processes.owner import check_process
from slurm_watchdog.knowledge.syscalls import FD_ARGUMENT, idle_numbers, name_of

MAX_FDS: Final = 4096
DEVICES: Final = "/dev/"
_MACHINE: Final = os.uname().machine
_IDLE: Final = idle_numbers(_MACHINE)


def look_at_calls(args: list[tuple[str, int, int]], state: dict[str, Any]) -> list[Any]:
    """For each [what, pid, thread] its answer, None where the thread is gone or may not be looked at.

    `io`: the text of /proc/PID/io. `call`: [line of syscall, wchan, io, open file or None], of which all but
    the first are empty
    where the call concerns no file. `devices`: [number of open files, those that are devices].
    """
    with ExitStack() as stack:
        places: dict[int, int] = {}
        return [_look(what, pid, thread, places, stack, state) for what, pid, thread in args]


def _look(
    what: str, pid: int, thread: int, places: dict[int, int], stack: ExitStack, state: dict[str, Any]
) -> Any:
    try:
        if pid not in places:  # walking the whole path for each thread would cost a tenth more
            if what not in OF_ANYBODY:
                check_process(pid, state)
            places[pid] = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, places[pid])
        return _KINDS[what](pid, thread, places[pid])
    except (OSError, ValueError, IndexError):
        return None


def _text(path: str, where: int | None = None) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=where)
    try:
        return os.read(fd, 8192).decode("latin-1")
    finally:
        os.close(fd)


def _io(pid: int, thread: int, where: int) -> str:
    return _text("../io", where)


def _call(pid: int, thread: int, where: int) -> list[str | None]:
    line = _text(f"{thread}/syscall", where)
    if line.split(" ", 1)[0].encode() in _IDLE and (pid != thread or not _is_in_d(thread, where)):
        return [line, "", "", None]  # most threads, most of the time
    call = parse_syscall(line.encode("latin-1"))
    if call is None:
        return [line, "", "", None]
    name = name_of(call.number, _MACHINE) if call.number >= 0 else None
    link = None
    if name in FD_ARGUMENT:
        try:
            link = os.readlink(f"../fd/{_int32(call.args[FD_ARGUMENT[name]])}", dir_fd=where)
        except OSError:
            pass  # it was closed meanwhile
    return [line, _text(f"{thread}/wchan", where), _text(f"{thread}/io", where), link]


def _is_in_d(thread: int, where: int) -> bool:
    stat = _text(f"{thread}/stat", where)
    return stat[stat.rindex(")") + 2 : stat.rindex(")") + 3] == "D"


def _devices(pid: int, thread: int, where: int) -> list[Any]:
    directory = f"/proc/{pid}/task/{thread}/fd"
    names = os.listdir(directory)[:MAX_FDS]
    found = set()
    for name in names:
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:
            continue
        if target.startswith(DEVICES):
            found.add(target)
    return [len(names), sorted(found)]


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


OF_ANYBODY: Final = frozenset({"devices"})
"""Also of root's and the system's processes: a daemon that holds a GPU is one of those. It tells numbers of
GPUs, nothing of the process."""
_KINDS: Final[dict[str, Callable[[int, int, int], Any]]] = {"io": _io, "call": _call, "devices": _devices}
