"""What the kernel says of threads only to their owner, and to whoever may trace everybody: read in the child `look`.

An agent with that right reads these small files in its loop, where they cannot hang (see process_table); one without asks for many at
once. Nothing of a process's memory is in them: the call it stands in, what it waits for, its counters, names of open files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from watchdog.agent.collectors.blocked import parse_syscall
from watchdog.agent.process_table import read_file
from watchdog.knowledge.syscalls import FD_ARGUMENT, PATH_ARGUMENT, name_of

MAX_FDS: Final = 4096
DEVICES: Final = "/dev/"
_MACHINE: Final = os.uname().machine


def look_at_calls(args: Any, state: dict[str, Any]) -> list[Any]:
    """For each [what, pid, thread] its answer, None where the thread is gone or may not be looked at.

    `io`: the text of /proc/PID/io. `call`: [line of syscall, wchan, io, open file or None], of which all but the first are empty
    where the call concerns no file. `devices`: [number of open files, those that are devices].
    """
    return [_look(_KINDS[what], pid, thread) for what, pid, thread in args]


def _look(how: Callable[[int, int], Any], pid: int, thread: int) -> Any:
    try:
        return how(pid, thread)
    except (OSError, ValueError, IndexError):
        return None


def _text(path: str) -> str:
    return read_file(path).decode("latin-1")


def _io(pid: int, thread: int) -> str:
    return _text(f"/proc/{pid}/io")


def _call(pid: int, thread: int) -> list[str | None]:
    task = f"/proc/{pid}/task/{thread}"
    line = _text(f"{task}/syscall")
    call = parse_syscall(line.encode("latin-1"))
    name = name_of(call.number, _MACHINE) if call is not None and call.number >= 0 else None
    if call is None or not (call.number < 0 or name in FD_ARGUMENT or name in PATH_ARGUMENT):
        return [line, _text(f"{task}/wchan") if call is not None and _is_in_d(task) else "", "", None]
    link = None
    if name in FD_ARGUMENT:
        try:
            link = os.readlink(f"/proc/{pid}/fd/{_int32(call.args[FD_ARGUMENT[name]])}")
        except OSError:
            pass  # it was closed meanwhile
    return [line, _text(f"{task}/wchan"), _text(f"{task}/io"), link]


def _is_in_d(task: str) -> bool:
    stat = _text(f"{task}/stat")
    return stat[stat.rindex(")") + 2 : stat.rindex(")") + 3] == "D"


def _devices(pid: int, thread: int) -> list[Any]:
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


_KINDS: Final[dict[str, Callable[[int, int], Any]]] = {"io": _io, "call": _call, "devices": _devices}
