"""One process of a job as the kernel sees it, read in a child: threads, kernel stacks, locks, open files, sockets.

Nothing here stops a process or asks ptrace for more than a look. Each process is sent as soon as it was read:
when one hangs, the others are known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from slurm_watchdog.agent.evidence.sockets import Tables, choose
from slurm_watchdog.agent.proc.files import read_call_name, read_file, read_links, read_stat, read_words
from slurm_watchdog.agent.processes.owner import check_process
from slurm_watchdog.agent.workers.request_types import ReadProcessStates
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base.mounts import mount_of, read_mounts
from slurm_watchdog.model.evidence import LockWait, ProcessState, SocketState, ThreadState

MAX_THREADS = 1024  # Of one process: whose state is read.
MAX_SHOWN = 16
"""Threads that are shown one by one: the main thread, and those that wait for a disk, a file or a debugger."""
MAX_STACK = 24
MAX_SILENT_FILES = 32
STATUS_LINES = (
    "Threads", "VmRSS", "VmSwap", "Cpus_allowed_list", "Mems_allowed_list", "TracerPid", "SigPnd", "ShdPnd", "SigBlk",
    "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches", "Seccomp",
)  # fmt: skip
LIMIT_LINES = (
    "Max locked memory",
    "Max open files",
    "Max processes",
    "Max core file size",
    "Max address space",
)
ENDED = "the process has ended"
_LOCK = re.compile(r"^\d+: (?P<waits>-> )?(?P<kind>\S+) +\S+ +(?P<what>\S+) (?P<pid>-?\d+) (?P<file>\S+)")


def read_process_states(request: ReadProcessStates, worker: WorkerState) -> None:
    """Sends a ProcessState for each process, in their order."""
    tables, silent = Tables(), frozenset(request.silent_mounts)
    locks = _read_locks()
    for pid, start_ticks in request.processes:
        try:
            check_process(pid, worker)
            found = _read_process(pid, start_ticks, tables, silent, locks)
        except OSError as error:
            refused = isinstance(error, PermissionError)
            found = ProcessState(pid=pid, error=str(error.strerror) if refused else ENDED)
        worker.send_part(found)


def _read_process(
    pid: int, start_ticks: int, tables: Tables, silent: frozenset[str], locks: dict[int, LockWait]
) -> ProcessState:
    try:
        stat = read_stat(pid)
    except (OSError, ValueError):
        return ProcessState(pid=pid, error=ENDED)
    if stat.start_ticks != start_ticks:
        return ProcessState(pid=pid, error=ENDED)
    found = ProcessState(pid=pid, lock=locks.get(pid), state=stat.state)
    parts: dict[str, Callable[[ProcessState], ProcessState]] = {
        "threads": _with_threads,
        "status": _with_status,
        "files": partial(_with_files, tables=tables, silent=silent),
    }
    for name, part in parts.items():
        try:
            found = part(found)
        except (OSError, ValueError) as error:
            found = replace(found, problems=(*found.problems, f"{name}: {error}"))
    return found


def _with_threads(found: ProcessState) -> ProcessState:
    pid = found.pid
    names = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    shown: list[ThreadState] = []
    for name in names[:MAX_THREADS]:
        try:
            stat = read_stat(f"{pid}/task/{name}")
            if int(name) == pid or (stat.state in "DTtR" and len(shown) < MAX_SHOWN):
                shown.append(_thread(f"/proc/{pid}/task/{name}", int(name), stat.comm, stat.state))
        except (OSError, ValueError):  # it ended
            continue
    shown.sort(key=lambda thread: (thread.thread_id != pid, thread.state != "D", thread.thread_id))
    return replace(found, threads=tuple(shown), threads_seen=len(names))


def _thread(base: str, thread_id: int, comm: str, state: str) -> ThreadState:
    return ThreadState(
        thread_id=thread_id, comm=comm, state=state, wchan=read_words(f"{base}/wchan"), syscall=read_call_name(base),
        kernel_stack=parse_kernel_stack(read_words(f"{base}/stack") or ""),
    )  # fmt: skip


def parse_kernel_stack(text: str) -> tuple[str, ...]:
    """The functions in /proc/PID/stack, innermost first, without addresses and offsets."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].startswith("["):
            found.append(words[1].partition("+")[0])
    return tuple(found[:MAX_STACK])


def _with_status(found: ProcessState) -> ProcessState:
    lines = dict(
        line.split(":", 1)
        for line in read_file(f"/proc/{found.pid}/status").decode(errors="replace").splitlines()
        if ":" in line
    )
    status: list[tuple[str, str]] = [(name, lines[name].strip()) for name in STATUS_LINES if name in lines]
    try:
        limits = Path(f"/proc/{found.pid}/limits").read_text()
    except OSError:
        limits = ""
    status += [
        (name, line[26:].split("  ")[0].strip())
        for line in limits.splitlines()
        for name in LIMIT_LINES
        if line.startswith(name)
    ]
    return replace(found, status=tuple(status))


def _with_files(found: ProcessState, tables: Tables, silent: frozenset[str]) -> ProcessState:
    """Descriptors by the names of their links alone: no file is touched."""
    pid = found.pid
    _, targets = read_links(f"/proc/{pid}/fd")
    inodes = {int(target[8:-1]) for target in targets if target.startswith("socket:[")}
    sockets: tuple[tuple[SocketState, ...], int] = choose(inodes, tables.of(pid)) if inodes else ((), 0)
    mounts = read_mounts(pid) if silent else ()
    on_silent = []
    for path in dict.fromkeys(target for target in targets if silent and target.startswith("/")):
        mount = mount_of(path, mounts)
        if mount is not None and mount.point in silent:
            on_silent.append(path)
    files = tuple(on_silent[:MAX_SILENT_FILES])
    return replace(found, sockets=sockets[0], sockets_seen=sockets[1], silent_files=files)


def parse_locks(text: str) -> list[tuple[int, str, str, int]]:
    """(waiting pid, kind, file, holding pid) for everybody who waits in /proc/locks (see proc(5))."""
    found, holder = [], -1
    for line in text.splitlines():
        match = _LOCK.match(line)
        if match is None:
            continue
        if match["waits"]:
            found.append((int(match["pid"]), f"{match['kind']} {match['what']}", match["file"], holder))
        else:
            holder = int(match["pid"])
    return found


def _read_locks() -> dict[int, LockWait]:
    try:
        text = Path("/proc/locks").read_text()
    except OSError:
        return {}
    waits = {}
    for pid, kind, file, holder in parse_locks(text):
        known = holder if holder > 0 else None
        comm = read_words(f"/proc/{known}/comm") if known is not None else None
        waits[pid] = LockWait(kind=kind, file=file, holder_pid=known, holder=comm)
    return waits
