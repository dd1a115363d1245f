"""What runs in a child of the agent: it becomes a user for good, and then serves the requests of one table.

A child is forked from the agent's own image. Frames in both directions are a length, a number and a letter, then JSON:
requests with the place of their task in the table, answers as values of the type that the request names. Nothing here
evaluates what a child sends. Before it touches the next of several processes a child notes in a page that it shares
with the agent which one that is: if it does not return, the agent reads there what it hangs on.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import mmap
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import msgspec

from slurm_watchdog.agent.children.become_user import Kind, become
from slurm_watchdog.agent.children.requests import Request, WorkerState
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import wait_readable

CPU_S = 5.0  # Of CPU time for one request: half of the usual deadline (agent.probe_deadline), far beyond any look.
CPU_OF_S: Mapping[str, float] = {"dump_stacks": 20.0, "read_gpus": 60.0}
"""64 processes with 4 MiB of JSON each; NVML, whose driver may spend seconds in its first answer, and which
parses no one's data."""
KILLED_AFTER_S = 5.0  # More of CPU time before the kernel kills a child in which the exception did not come through.
ADDRESS_SPACE = 256 << 20  # Bytes beyond what the child has at its start: a look takes 10 MiB, the largest answer 100.
UNLIMITED = frozenset({"read_gpus"})  # Driver libraries map address space as they like, and read no user's data.
MAX_FRAME = 16 * 1024**2
BETWEEN_S = 1.0  # Between two looks that no one asked for.
TRIM_EVERY = 120  # Requests of a child, or ticks of the loop, after which free memory goes back: ten minutes.
FIRST_TRIM = 3  # And once soon: what starting took is never taken again.
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
HEAD = struct.Struct("=IiB")  # Length of the body, number of the request, task or letter.
GIVEN_UP = "given up"  # How the reason begins where what was looked at costs too much.
BEGUN, ANSWER, ERROR, LEFT = 0, 1, 2, 3
"""Letters of a child's frames: it has become its user; the answer; why there is none; pids of programs that it started
and that did not end when they were killed."""
_encoder = msgspec.json.Encoder()
_LIBC = ctypes.CDLL(None, use_errno=True)  # Made once, before the fork: each makes a class of its own.
log = logging.getLogger(__name__)

Function = Callable[[Any, WorkerState], Any]
"""What a child can do: given a request and the child's state, returns the answer. Raises anything."""


@dataclass(frozen=True)
class Task:
    """One request that children serve: its type, the function that does it, and in which kind of child."""

    request: type[Request[Any]]
    do: Function  # Given a `request` and the child's state; returns the answer that the request's type names.
    kind: Kind


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
        raise CpuSpentError(f"{GIVEN_UP} after {seconds:g} s of CPU time")

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


# -- frames --------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """JSON; what is no UTF-8 in it is restored by `decode`."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a file name that is no UTF-8: Python carries its bytes as lone surrogates
        import json

        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


@cache
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """What reads JSON as a value of this type. Making one takes milliseconds and a megabyte."""
    return msgspec.json.Decoder(kind)


def decode(data: bytes | bytearray, kind: Any = Any) -> Any:
    """What `encode` was given, as a value of this type. Raises msgspec.ValidationError for another one, ValueError for
    what is no JSON."""
    try:
        return decoder(kind).decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        import json

        return msgspec.convert(json.loads(data), kind)


def frame(number: int, letter: int, value: Any) -> bytes:
    """`value` as it goes over the socket. Raises ValueError where it is too large."""
    data = encode(value)
    if len(data) > MAX_FRAME:
        raise ValueError(f"an answer of {len(data)} bytes is too large")
    return HEAD.pack(len(data), number, letter) + data


def unframe(inbox: bytearray) -> list[tuple[int, int, bytes]]:
    """Takes every complete frame out of `inbox`: number, letter, body. Raises ValueError for what is none."""
    frames, begin = [], 0
    while len(inbox) - begin >= HEAD.size:
        size, number, letter = HEAD.unpack_from(inbox, begin)
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME} are taken")
        end = begin + HEAD.size + size
        if len(inbox) < end:
            break
        frames.append((number, letter, bytes(inbox[begin + HEAD.size : end])))
        begin = end
    del inbox[:begin]
    return frames


# -- the child -----------------------------------------------------------------------------------------------------


def fork_child(key: str, uid: int, kind: Kind, tasks: tuple[Task, ...]) -> tuple[int, socket.socket, mmap.mmap]:
    """Forks a child that becomes `uid` (-1: nobody else) and serves the tasks of its kind. Returns its pid, our end of
    its socket, and the page in which it notes what it is about to touch. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    me, place = os.getpid(), mmap.mmap(-1, mmap.PAGESIZE)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        raise
    finally:
        if os.getpid() == me:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
    if pid == 0:
        state = WorkerState(uid, place)
        child_main(lambda: serve(theirs.fileno(), key, kind, tasks, state, me))
    ours.setblocking(False)
    return pid, ours, place


def child_main(work: Callable[[], None]) -> None:
    """Runs `work` in a process that was just forked, and never returns into the parent's code."""
    try:
        work()
    except BaseException:  # a forked child must not run its parent's handlers
        log.exception("a child of the agent failed")
    finally:
        os._exit(0)


def serve(fd: int, key: str, kind: Kind, tasks: tuple[Task, ...], state: WorkerState, parent: int) -> None:
    """Becomes the user, and answers until the other end of the socket `fd` is closed."""
    _leave_parent_behind(fd)
    refusal = become(state.uid, kind)
    die_with_parent(parent)  # after the change of user, which resets it
    os.chdir("/")
    # What `ps` and `top` call this process: the kernel keeps 15 bytes.
    _LIBC.prctl(PR_SET_NAME, f"swd {key}".encode(errors="surrogateescape"))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold users' data
    # An agent that lets go without waiting for the answer is no failure of ours.
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        inbox, answered = bytearray(), 0
        sock.sendall(HEAD.pack(0, 0, BEGUN))
        while data := _receive(sock, state):
            inbox += data
            for number, index, body in unframe(inbox):
                state.note(0)
                sock.sendall(_answer(number, tasks[index], body, kind, state, refusal))
                if state.left:
                    sock.sendall(frame(number, LEFT, state.left))
                    state.left.clear()
                answered += 1
                if answered % TRIM_EVERY == FIRST_TRIM:
                    give_back_memory()


def _receive(sock: socket.socket, state: WorkerState) -> bytes:
    """The next bytes; while they do not come, what the child does between two requests."""
    while state.between is not None and not wait_readable([sock.fileno()], BETWEEN_S):
        try:
            state.between()
        except Exception:
            log.exception("a look between two requests failed")
            state.between = None
    return sock.recv(1 << 14)


def _leave_parent_behind(kept: int) -> None:
    """Its signals, its descriptors, its garbage: the kernel's log, sockets of others, open directories of /proc."""
    gc.freeze()  # what is garbage of the parent's may own numbers of descriptors that will be ours
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's; its end ends us
    signal.set_wakeup_fd(-1)
    os.closerange(3, kept)
    os.closerange(kept + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _answer(number: int, task: Task, body: bytes, kind: Kind, state: WorkerState, refusal: str | None) -> bytes:
    """The frame with what came of one request."""
    try:
        if refusal is not None:
            return frame(number, ERROR, refusal)
        if task.kind is not kind:
            return frame(number, ERROR, f"{task.request.task} is not done in a child for {kind.value}")
        return frame(number, ANSWER, _do(task, decode(body, task.request), state))
    except CpuSpentError as spent:
        problem = str(spent)
    except MemoryError:
        problem = f"{GIVEN_UP}: it needs more memory than a child may use"
    except OSError as error:
        problem = describe(error)
    except Exception as error:
        log.exception("%s failed in a child", task.request.task)
        problem = f"{type(error).__name__}: {error}"
    return frame(number, ERROR, problem)


def _do(task: Task, request: Request[Any], state: WorkerState) -> Any:
    name = task.request.task
    if name not in UNLIMITED and not state.is_limited:
        state.is_limited = True
        limit_address_space()
    with cpu_budget(CPU_OF_S.get(name, CPU_S)):
        return task.do(request, state)


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
