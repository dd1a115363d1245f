"""Python stacks of all ranks of a job, without stopping anything: `py-spy dump --nonblocking` reads even a
D-state process.

Runs in a child that is the processes' user. Each dump is a process of its own with a deadline; one that does not come
back is killed and, if the kernel does not let it go, left and counted: of one user, no more than a few. A rank that
cannot be dumped gets an entry with the reason: that is evidence, too.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.become_user import CAP_SYS_PTRACE, read_refusal
from slurm_watchdog.agent.children.requests import DumpProcessStacks, WorkerState
from slurm_watchdog.agent.evidence.tool import Means, Ran, run_tools
from slurm_watchdog.agent.proc.entry import Stat, parse_status
from slurm_watchdog.agent.proc.files import read_call_name, read_file, read_stat, read_words
from slurm_watchdog.agent.proc.system_call import SystemCall, int32, parse_io_bytes, parse_syscall
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing, opened
from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.stack_frames import TRAINING_THREAD
from slurm_watchdog.knowledge.syscalls import name_of
from slurm_watchdog.model.evidence import Frame, ProcessStack, SocketBytes, ThreadStack, WaitingThreads
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.parse.stacks.headers import AT_EXIT, ROOTS

# What came and went on the connections that a process waits for: /proc/PID/io does not count send() and recv().
# The kernel counts for each TCP connection. To ask it takes a copy of the process's descriptor, held for the moment
# of the question; nothing is read from it.

TALKS = frozenset(
    {"sendto", "recvfrom", "sendmsg", "recvmsg", "sendmmsg", "recvmmsg", "read", "write", "readv", "writev"}
)
"""Calls whose first argument is the connection."""
POLLS = frozenset({"poll", "ppoll"})  # … and those that point to a table of them: Python waits so with a time-out.
MOST_THREADS = 256
MOST_CONNECTIONS = 16
MOST_POLLED = 8  # Connections; who polls more serves others.
_POLLFD = struct.Struct("=ihh")
_COUNTS = struct.Struct("=QQ")
COUNTS_AT = 120  # tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (linux/tcp.h, since Linux 4.1).
PIDFD_GETFD = 438  # Number of this call on every architecture (Linux 5.6).
_LIBC = ctypes.CDLL(None, use_errno=True)


LOOKS = 3  # A thread may wake between the reading of its state and that of its system call.


def read_threads(pid: int) -> tuple[tuple[WaitingThreads, ...] | None, tuple[SocketBytes, ...]]:
    """Of the process `pid`: its threads without the main one, counted by name, state and system call, None where that
    cannot be known of all; and the connections that its threads wait for, as far as that can be known."""
    alike, sockets = Counter[tuple[str, str, str]](), dict[str, SocketBytes]()
    try:
        numbers = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None, ()
    whole = len(numbers) <= MOST_THREADS + 1
    for number in numbers[: MOST_THREADS + 1]:
        with suppress(OSError, ValueError, struct.error):  # it has ended meanwhile
            stat, call = _look_at(pid, number)
            name = name_of(call.number, os.uname().machine) if call is not None and call.number >= 0 else ""
            if number != str(pid):
                whole &= call is not None or stat.state == "R"
                alike[stat.comm, stat.state, name] += 1
            # Not of one in D: it may hold a connection's own lock.
            for fd in _descriptors(pid, call, name) if call is not None and stat.state == "S" else ():
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                known = not link.startswith("socket:") or link in sockets or len(sockets) == MOST_CONNECTIONS
                if not known and (count := _count(pid, fd)) is not None:
                    sockets[link] = SocketBytes(socket=link, moved=count)
    rows = sorted(alike.items())
    waiting = (WaitingThreads(name=name, state=state, call=call, threads=n) for (name, state, call), n in rows)
    return tuple(waiting) if whole else None, tuple(sockets.values())


def _look_at(pid: int, number: str, looks: int = LOOKS) -> tuple[Stat, SystemCall | None]:
    task = f"{pid}/task/{number}"
    # A call that may not be read is not known: only a thread that has ended is left out.
    stat, call = read_stat(task), parse_syscall((read_words(f"/proc/{task}/syscall") or "").encode())
    if call is not None or stat.state == "R" or looks == 1:
        return stat, call
    return _look_at(pid, number, looks - 1)


def _descriptors(pid: int, call: SystemCall, name: str) -> Iterator[int]:
    if name in TALKS:
        yield int32(call.args[0])
    elif name in POLLS and 0 < call.args[1] <= MOST_POLLED:
        with opened(f"/proc/{pid}/mem", os.O_RDONLY) as memory:
            table = os.pread(memory, call.args[1] * _POLLFD.size, call.args[0])
        yield from (fd for fd, _, _ in _POLLFD.iter_unpack(table) if fd >= 0)


def _count(pid: int, fd: int) -> int | None:
    """Bytes that the other end has acknowledged, and those that came; None for what is no TCP connection."""
    with closing(os.pidfd_open(pid)) as process:
        copy = _LIBC.syscall(PIDFD_GETFD, process, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        with socket.socket(fileno=copy) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return None
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTS_AT + _COUNTS.size)
    acknowledged, received = _COUNTS.unpack_from(told, COUNTS_AT)
    return int(acknowledged + received)


# How long a process has asked the kernel to let it sleep: a retry sleeps for seconds, what sleeps for days hangs.
# The time stands in the memory of the process, where its system call points to. It is read only if the thread is in
# this very call, and believed only if it still is afterwards.

FOR_EVER_S = 1e9  # Of a sleep without an end, and the most that is said.
TIMER_ABSTIME = 1  # linux/time.h
CLOCKS = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC)
TIMES_OF_SELECT = {"select": 1e-6, "pselect6": 1e-9}
"""Call -> unit of the second number of its timeout (timeval, timespec), in seconds. Of no descriptors it is a sleep:
that of Python up to 3.10."""
_TWO_NUMBERS = struct.Struct("=qq")  # struct timespec and struct timeval of 64-bit machines


def read_sleep_s(pid: int) -> float | None:
    """Seconds after which the main thread of `pid` wakes by itself. None: it does not sleep, or it is not known."""
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


ONE_DUMP_S = 10.0  # py-spy takes 15 to 30 ms a process; what takes this long does not come.
WORKERS_PER_RANK = 4
MAX_PROCESSES = 64
MAX_FRAMES = 100
MAX_THREADS = 128
MAX_OUTPUT = 4 << 20
PY_SPY_ADDRESS_SPACE = 160 << 20  # Bytes: py-spy maps the interpreter; 40 MiB are enough for Python 3.11 (measured).
TOO_MANY = "not dumped: too many dumps of this user's processes hang"
PY_SPY_PROCESSES = 64  # More than its user has when it starts.
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

_Number = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**63 - 1)]  # What a report can hold.


class _SpyFrame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    short_filename: str | None = None
    line: _Number = 0
    is_entry: bool = False  # Whether the interpreter called it from C; py-spy knows that from Python 3.11 on.


class _SpyThread(msgspec.Struct):
    pid: _Number
    thread_id: _Number
    thread_name: str | None = None
    os_thread_id: _Number | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_SpyFrame] = []


def choose(processes: Iterable[Process]) -> list[Process]:
    """Which processes of a job to dump, in this order: every rank, then a few workers of each."""
    alive = [process for process in processes if process.role is not Role.HELPER]
    ranks = sorted((p for p in alive if p.role is Role.RANK), key=lambda p: (p.rank or 0, p.pid))
    workers, count = [], dict[int | None, int]()
    for process in sorted((p for p in alive if p.role is Role.WORKER), key=lambda p: (p.start_ticks, p.pid)):
        count[process.rank] = count.get(process.rank, 0) + 1
        if count[process.rank] <= WORKERS_PER_RANK:
            workers.append(process)
    return [*ranks, *workers][:MAX_PROCESSES]


def find_py_spy() -> str | None:
    """The program of our own environment, otherwise the one on PATH; None if there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def parse_dump(text: bytes) -> tuple[ThreadStack, ...]:
    """The threads in the output of `py-spy dump --json`, frames innermost first. Raises ValueError."""
    try:
        threads = msgspec.json.decode(text, type=list[_SpyThread])
    except RecursionError:
        raise ValueError("py-spy printed something else than stacks: it nests too deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"py-spy printed something else than stacks: {error}") from error
    return tuple(
        ThreadStack(
            thread_id=thread.os_thread_id or thread.thread_id,
            # A program that never imported `threading` has no names for its threads.
            name=thread.thread_name or ("MainThread" if thread.os_thread_id == thread.pid else ""),
            active=thread.active,
            owns_gil=thread.owns_gil,
            frames=_frames(thread),
        )
        for thread in threads[:MAX_THREADS]
    )


def _frames(thread: _SpyThread) -> tuple[Frame, ...]:
    frames = tuple(
        Frame(function=frame.name, file=frame.short_filename or frame.filename, line=frame.line)
        for frame in thread.frames[:MAX_FRAMES]
    )
    if len(thread.frames) > MAX_FRAMES or not thread.frames or thread.os_thread_id != thread.pid:
        return frames
    root = thread.frames[-1]
    return (*frames, AT_EXIT) if root.is_entry and root.name not in ROOTS else frames


def dump_stacks(request: DumpProcessStacks, worker: WorkerState) -> list[ProcessStack]:
    """A ProcessStack for each process, in their order."""
    end, py_spy = clock.monotonic() + request.budget_s, find_py_spy()
    missing = "py-spy was not found: it belongs into the environment of slurm-watchdog" if py_spy is None else None
    stacks: list[ProcessStack] = []
    started: list[int] = []

    def jobs() -> Iterator[Callable[[], tuple[list[str], Means]]]:
        for process in request.processes:
            stack = _begun(_undumped(process, request.node), worker, end)
            full = TOO_MANY if len(worker.left) >= request.may_hang else None
            stacks.append(replace(stack, error=stack.error or missing or full))
            if stacks[-1].error is None:
                started.append(len(stacks) - 1)
                yield partial(_command, str(py_spy), process.pid, end)

    for number, ran in run_tools(jobs(), worker.left):
        stacks[started[number]] = _ended(stacks[started[number]], ran, worker)
    return stacks


def _begun(stack: ProcessStack, worker: WorkerState, end: float) -> ProcessStack:
    """With the kernel's word about it, just before; with the reason where it is not to be dumped."""
    if (refusal := _refusal(stack.pid, worker)) is not None:
        return replace(stack, error=refusal)
    stack = _with_facts(stack)
    if stack.state is None:
        return replace(stack, error="the process has ended")
    if stack.state in ("Z", "X"):
        return replace(stack, error="the process is dead (a zombie)")
    return replace(stack, error="no time was left for it" if clock.monotonic() >= end else None)


def _refusal(pid: int, worker: WorkerState) -> str | None:
    try:
        return read_refusal(pid, worker.own)
    except OSError:
        return "the process has ended"


def _command(py_spy: str, pid: int, end: float) -> tuple[list[str], Means]:
    """What is to be run, with what is left of the time."""
    seconds = max(0.1, min(ONE_DUMP_S, end - clock.monotonic()))
    means = Means(
        seconds=seconds, output_bytes=MAX_OUTPUT, address_space=PY_SPY_ADDRESS_SPACE, cpu_s=math.ceil(ONE_DUMP_S),
        processes=count_tasks() + PY_SPY_PROCESSES, capabilities=frozenset({CAP_SYS_PTRACE}),
    )  # fmt: skip
    return [py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)], means


def _ended(stack: ProcessStack, ran: Ran, worker: WorkerState) -> ProcessStack:
    """With what py-spy has printed, unless the process has become another user's program meanwhile."""
    problem = _refusal(stack.pid, worker)
    if problem is None and ran.problem is not None:
        problem = f"py-spy: {ran.problem}"
    elif problem is None and ran.code != 0:
        lines = [line.strip() for line in ran.errors.decode(errors="replace").splitlines() if line.strip()]
        problem = f"py-spy: {'; '.join(lines[:3])[:300] or f'exit code {ran.code}'}"
    try:
        threads = parse_dump(ran.out) if problem is None else ()
    except ValueError as error:
        problem, threads = str(error), ()
    trains = next((each for each in threads if re.match(TRAINING_THREAD, each.name)), None)
    main_cpu_s = stack.main_cpu_s if trains is None else _thread_cpu_s(stack.pid, trains.thread_id)
    return replace(stack, error=problem, threads=threads, main_cpu_s=main_cpu_s)


def count_tasks() -> int:
    """Processes and threads of this process's user: RLIMIT_NPROC of what it starts counts them all."""
    own, tasks = os.geteuid(), 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, ValueError):  # it ended
            if os.stat(f"/proc/{name}").st_uid == own:
                tasks += parse_status(read_file(f"/proc/{name}/status")).threads
    return tasks


def _undumped(process: Process, node: str) -> ProcessStack:
    return picked(ProcessStack, process, "pid", "start_ticks", "job_id", "role", "rank", "local_rank", node=node)


def _with_facts(stack: ProcessStack) -> ProcessStack:
    """With what the kernel says just before the dump; without a state where the process has ended."""
    pid = stack.pid
    try:
        stat = read_stat(pid)
        if stat.start_ticks != stack.start_ticks:
            return stack
        cpu_s = stat.cpu_ticks / CLOCK_TICKS
        stack = replace(stack, state=stat.state, cpu_s=cpu_s, main_cpu_s=_thread_cpu_s(pid, pid))
        pages = int(read_file(f"/proc/{pid}/statm").split()[1])
        others, waits_for = read_threads(pid)
        return replace(
            stack, resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"), io_bytes=_read_io(pid),
            wchan=read_words(f"/proc/{pid}/wchan"), syscall=read_call_name(f"/proc/{pid}"), sleep_s=read_sleep_s(pid),
            others=others, waits_for=waits_for,
        )  # fmt: skip
    except (OSError, ValueError, IndexError):
        return stack


def _thread_cpu_s(pid: int, thread_id: int) -> float | None:
    try:
        return read_stat(f"{pid}/task/{thread_id}").cpu_ticks / CLOCK_TICKS
    except (OSError, ValueError):
        return None


def _read_io(pid: int) -> int | None:
    try:
        return parse_io_bytes(read_file(f"/proc/{pid}/io"))
    except (OSError, ValueError):
        return None
