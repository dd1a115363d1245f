"""What runs in the agent's children: the spawner, which only forks, and the workers, which do what may hang.

Frames: four bytes of length, then JSON. A request is [number, task, fields]; a part of its answer is
[number, value], the answer itself [number, value, error]. Number 0 is about any request: a part of it says
that the child has begun, and its pid; an error that there is none. Nothing here evaluates what a worker says.

The spawner is the agent's own child, or that of a helper with rights which the agent lacks (see
slurm_watchdog.agent.helper.server).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol

import msgspec

from slurm_watchdog.agent.workers.become_user import become
from slurm_watchdog.agent.workers.request_types import WorkerState
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import wait_readable

CPU_S = 5.0  # Of CPU time for one request: half of the usual deadline (agent.probe_deadline), far beyond any look.
CPU_OF_S: Mapping[str, float] = {"dump_stacks": 20.0, "read_gpus": 60.0}
"""64 processes with 4 MiB of JSON each; NVML, whose driver may spend seconds in its first answer, and which
parses no one's data."""
KILLED_AFTER_S = 5.0  # More of CPU time before the kernel kills a child in which the exception did not come through.
ADDRESS_SPACE = 256 << 20  # Bytes beyond what the child has at its start: a look takes 10 MiB, the largest answer 100.
UNLIMITED = frozenset({"read_gpus"})  # Driver libraries map address space as they like, and read no user's data.


class CpuSpentError(BaseException):
    """The CPU time of one request is spent. No Exception: what a function forgives does not include this."""


def limit_address_space(room: int = ADDRESS_SPACE) -> None:
    """At most `room` bytes more than this process has mapped now. Where that is not known nothing changes."""
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


log = logging.getLogger(__name__)

Function = Callable[[Any, WorkerState], Any]
"""What a worker can do: given a request and the worker's state, returns the answer. Raises anything."""


class Functions(Protocol):
    """What a worker can do, by name."""

    def get(self, name: str, /) -> Function | None:
        """The function, None if there is none of this name."""


PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
MAX_FRAME = 16 * 1024**2
BETWEEN_S = 1.0  # Between two looks that no one asked for.
TRIM_EVERY = 120  # Requests of a worker, or ticks of the loop, after which free memory goes back: ten minutes.
FIRST_TRIM = 3  # And once soon: what starting took is never taken again.
_encoder = msgspec.json.Encoder()
_LIBC = ctypes.CDLL(None, use_errno=True)  # Made once, before the fork: each makes a class of its own.


def frame(value: Any) -> bytes:
    """`value` as it goes over the socket. Too large an answer becomes an error in its place."""
    data = encode(value)
    if len(data) > MAX_FRAME:
        data = encode([value[0], None, f"an answer of {len(data)} bytes is too large"])
    return struct.pack("=I", len(data)) + data


def unframe(inbox: bytearray, max_frame: int = MAX_FRAME) -> list[Any]:
    """Takes every complete frame out of `inbox`. Raises ValueError for what is none."""
    values, begin = [], 0
    while len(inbox) - begin >= 4:
        (size,) = struct.unpack_from("=I", inbox, begin)
        if size > max_frame:
            raise ValueError(f"a frame of {size} bytes; at most {max_frame} are taken")
        if len(inbox) - begin < 4 + size:
            break
        values.append(decode(bytes(inbox[begin + 4 : begin + 4 + size])))
        begin += 4 + size
    del inbox[:begin]
    return values


def encode(value: Any) -> bytes:
    """JSON; what is no UTF-8 in it comes back as it was."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a file name that is no UTF-8: Python carries its bytes as lone surrogates
        import json

        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """What `encode` was given."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        import json

        return json.loads(data)


def child_main(work: Callable[[], None]) -> None:
    """Runs `work` in a process that was just forked, and never returns into the parent's code."""
    try:
        work()
    except BaseException:  # a forked child must not run its parent's handlers
        log.exception("a child of the agent failed")
    finally:
        os._exit(0)


def spawn_for_ever(control: socket.socket, functions: Functions, parent: int) -> None:
    """The spawner: for each message [key, uid] with one end of a socket it forks a worker that serves this socket."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # An agent that has restarted still holds them (runner.Signals.hold).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's; its end ends us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the workers
    signal.set_wakeup_fd(-1)
    die_with_parent(parent)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        if fds:
            key, uid = decode(message)
            fork_worker([control], fds[0], key, uid, functions)


def fork_worker(
    to_close: Iterable[socket.socket], fd: int, key: str, uid: int, functions: Functions,
    max_frame: int = MAX_FRAME,
) -> int:  # fmt: skip
    """Forks the worker that serves the socket `fd`, which is closed here. Returns its pid, -1 if there is none."""
    me = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # too many processes, or no memory: the agent asks again later
        say_no_start(fd, f"no child can be started: {describe(error)}")
        return -1
    if pid == 0:
        for each in to_close:
            each.close()
        child_main(lambda: _work_for_ever(fd, key, uid, functions, me, max_frame))
    os.close(fd)
    return pid


def say_no_start(fd: int, why: str) -> None:
    """Tells the one who wanted a worker behind the socket `fd` why there is none, and closes it."""
    try:
        os.set_blocking(fd, False)
        os.write(fd, frame([0, None, why]))
    except OSError:
        pass  # it has been given up meanwhile
    os.close(fd)


def _work_for_ever(fd: int, key: str, uid: int, functions: Functions, parent: int, max_frame: int = MAX_FRAME) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    refusal = become(uid)
    die_with_parent(parent)  # after the change of user, which resets it
    os.chdir("/")
    # What `ps` and `top` call this process: the kernel keeps 15 bytes.
    _LIBC.prctl(PR_SET_NAME, f"swd {key}".encode(errors="surrogateescape"))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold other users' data
    worker = WorkerState(uid)
    # An agent that lets go without waiting for the answer is no failure of ours.
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        inbox, answered = bytearray(), 0
        sock.sendall(frame([0, os.getpid()]))
        while data := _receive(sock, worker):
            inbox += data
            for request, function, args in unframe(inbox, max_frame):
                worker.send_part = partial(_send_part, sock, request)
                sock.sendall(frame([request, *_call(functions.get(function), function, args, worker, refusal)]))
                if worker.ends:
                    return
                answered += 1
                if answered % TRIM_EVERY == FIRST_TRIM:
                    give_back_memory()


def _receive(sock: socket.socket, worker: WorkerState) -> bytes:
    """The next bytes; while they do not come, what the worker does between two requests."""
    while worker.between is not None and not wait_readable([sock.fileno()], BETWEEN_S):
        try:
            worker.between()
        except Exception:
            log.exception("a look between two requests failed")
            worker.between = None
    return sock.recv(1 << 14)


def _send_part(sock: socket.socket, request: int, value: Any) -> None:
    sock.sendall(frame([request, value]))


def _call(
    function: Function | None, name: str, args: Any, worker: WorkerState, refusal: str | None
) -> tuple[Any, str | None]:
    if refusal is not None:
        return None, refusal
    if function is None:
        return None, f"no function {name!r}"
    if name not in UNLIMITED and not worker.is_limited:
        worker.is_limited = True
        limit_address_space()
    try:
        with cpu_budget(CPU_OF_S.get(name, CPU_S)):
            return function(args, worker), None
    except CpuSpentError as spent:
        return None, str(spent)
    except MemoryError:
        return None, "given up: it needs more memory than a child may use"
    except OSError as error:
        return None, describe(error)
    except Exception as error:
        log.exception("%s failed in a child", name)
        return None, f"{type(error).__name__}: {error}"


def give_back_memory() -> None:
    """Returns what malloc holds free in between. Large answers among small values that stay leave holes, and with the
    holes the loop grew by 2 MiB in a day while what it knows did not; with this, not at all. Costs some 0.1 ms."""
    trim = getattr(_LIBC, "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def die_with_parent(parent: int) -> None:
    """This process is killed when `parent` ends, or exits now if it has ended already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
