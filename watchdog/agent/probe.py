"""Disposable children: everything that could hang is done in one of them, with a deadline.

A small process, the spawner, is forked before the agent has any thread. On request it forks workers that share its
memory; each worker serves one resource, named by its key (`identify`, `stacks`, `files:/shared:1000`). A worker that
misses its deadline is left alone: it is reported as hung, gets nothing more to do and is not replaced, until it answers;
that answer is dropped, and the worker is free again. The agent's loop never waits for any of them.

Frames: four bytes of length, then JSON. Nothing here evaluates what a worker says.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import logging
import os
import pwd
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from watchdog import clock
from watchdog.model import HungProbe
from watchdog.runner import wait_readable

log = logging.getLogger(__name__)

Function = Callable[[Any, dict[str, Any]], Any]
"""What a worker can do: given the arguments of the request and a dictionary of its own that lasts as long as the worker."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_FRAME = 16 * 1024**2
MAX_WORKERS = 48
"""A node has a handful of mounts and users; more children than this would be an attack on the node by the watchdog."""
IDLE_S = 600.0


class ProbesLost(Exception):
    """The spawner is gone: no child can be started any more, the agent has to be started anew."""


@dataclass(frozen=True)
class Answer:
    """What became of one request: `error` is None if, and only if, the function returned `value`."""

    request: int
    key: str
    value: Any = None
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0


Then = Callable[[Answer], None]


@dataclass
class _Worker:
    key: str
    uid: int
    sock: socket.socket
    used_at: float
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    request: int | None = None
    asked_at: float = 0.0
    deadline: float = 0.0
    hung: bool = False
    then: Then | None = None


class Probes:
    """The pool of workers. `now` is the monotonic clock of the caller."""

    def __init__(self, functions: Mapping[str, Function], max_workers: int = MAX_WORKERS):
        """Forks the spawner: to be made before any thread. `functions` are what workers can do, by name."""
        self._max_workers = max_workers
        self._workers: dict[str, _Worker] = {}
        self._next_request = 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        gc.collect()
        gc.freeze()  # the collector writes into objects, and what is written to is shared no more
        self.spawner_pid = os.fork()
        if self.spawner_pid == 0:
            ours.close()
            _child_main(lambda: _spawn_for_ever(theirs, functions, parent))
        theirs.close()
        self._control = ours
        self._control.settimeout(5.0)  # the spawner only forks; were it to stop, the agent must not

    def ask(
        self, key: str, function: str, args: Any, deadline_s: float, now: float, then: Then, uid: int = -1
    ) -> int | None:
        """Gives `key`'s worker something to do; returns the request's number, or None if it is busy or hung.

        The worker is started if there is none; with `uid` it becomes that user first. `then` is called once, by `poll` or
        `settle`: with the answer, or when the deadline has passed. Raises ProbesLost if no worker can be started.
        """
        worker = self._workers.get(key)
        if worker is not None and worker.request is not None:
            return None
        if worker is not None and worker.uid != uid:
            self.retire(key)
            worker = None
        if worker is None:
            if len(self._workers) >= self._max_workers and not self._retire_oldest_idle():
                return None
            worker = self._start(key, uid, now)
        request, self._next_request = self._next_request, self._next_request + 1
        worker.request, worker.asked_at, worker.deadline = request, now, now + deadline_s
        worker.used_at, worker.then = now, then
        worker.outbox += _frame([request, function, args])
        self._flush(worker)
        return request

    def poll(self, now: float) -> set[int]:
        """Hands out all answers that are there, and one with `timed_out` for each deadline that has passed just now.

        Returns the numbers of the requests that are thereby done. What a `then` raises is logged, and no more.
        """
        done = set()
        for worker in list(self._workers.values()):
            self._flush(worker)
            then = worker.then
            answers = self._read(worker, now)
            if worker.request is not None and not worker.hung and now >= worker.deadline:
                worker.hung = True
                waited = now - worker.asked_at
                log.warning(
                    "%s has not answered for %.1f s: it is left alone until it does", worker.key, waited
                )
                why = f"no answer within {waited:.0f} s"
                answers.append(Answer(worker.request, worker.key, None, why, True, waited))
            for answer in answers:
                done.add(answer.request)
                _hand_over(answer, then)
            if worker.request is None and now - worker.used_at > IDLE_S:
                self.retire(worker.key)
        return done

    def settle(self, seconds: float, requests: Iterable[int]) -> None:
        """Waits at most `seconds` for the answers of `requests`, handing out whatever comes."""
        wanted = set(requests)
        end = clock.monotonic() + seconds
        while True:
            now = clock.monotonic()
            wanted -= self.poll(now)
            fds = [worker.sock.fileno() for worker in self._workers.values() if worker.request in wanted]
            if not fds or now >= end:
                return
            wait_readable(fds, end - now)

    def is_free(self, key: str) -> bool:
        """Whether `ask` would give `key` something to do."""
        worker = self._workers.get(key)
        return worker is None or worker.request is None

    def hung_since(self, key: str, now: float) -> float | None:
        """For how many seconds the hung worker of `key` has been waiting; None if it is not hung."""
        worker = self._workers.get(key)
        return now - worker.asked_at if worker is not None and worker.hung else None

    def hung(self, now: float) -> tuple[HungProbe, ...]:
        """Every child that did not come back, the longest first."""
        found = [
            HungProbe(probe=worker.key, seconds=now - worker.asked_at)
            for worker in self._workers.values()
            if worker.hung
        ]
        return tuple(sorted(found, key=lambda probe: -probe.seconds))

    def filenos(self) -> list[int]:
        """Descriptors that become readable when an answer comes, or the spawner dies."""
        return [
            self._control.fileno(),
            *(worker.sock.fileno() for worker in self._workers.values() if worker.request is not None),
        ]

    def check(self) -> None:
        """Raises ProbesLost if the spawner is gone."""
        if select.select([self._control], [], [], 0)[0]:
            raise ProbesLost("the process that starts the agent's children has ended")

    def retire(self, key: str) -> None:
        """Ends the worker of `key` unless it has something to do: it sees the end of its socket and exits."""
        worker = self._workers.get(key)
        if worker is not None and worker.request is None:
            worker.sock.close()
            del self._workers[key]

    def names(self) -> list[str]:
        """Keys of all workers."""
        return list(self._workers)

    def close(self) -> None:
        """Lets all children go; those in the kernel's uninterruptible sleep end when that does."""
        for worker in self._workers.values():
            worker.sock.close()
        self._workers.clear()
        self._control.close()
        try:
            os.kill(self.spawner_pid, signal.SIGTERM)
            os.waitpid(self.spawner_pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass

    def _start(self, key: str, uid: int, now: float) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            ours.setblocking(False)
            try:
                socket.send_fds(self._control, [json.dumps([key, uid]).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise ProbesLost(f"no child can be started: {error}") from error
        worker = self._workers[key] = _Worker(key, uid, ours, now)
        return worker

    def _retire_oldest_idle(self) -> bool:
        idle = [worker for worker in self._workers.values() if worker.request is None]
        if not idle:
            log.warning("all %d children are busy or hung: nothing more is asked", self._max_workers)
            return False
        self.retire(min(idle, key=lambda worker: worker.used_at).key)
        return True

    def _flush(self, worker: _Worker) -> None:
        while worker.outbox:
            try:
                del worker.outbox[: worker.sock.send(worker.outbox)]
            except BlockingIOError:
                return
            except OSError:
                worker.outbox.clear()  # its end is seen when reading
                return

    def _read(self, worker: _Worker, now: float) -> list[Answer]:
        ended = False
        while True:
            try:
                data = worker.sock.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                ended = True
                break
            worker.inbox += data
        try:
            answers = [self._take(worker, reply, now) for reply in _unframe(worker.inbox)]
        except (ValueError, TypeError) as error:
            log.error("%s said something that is no answer (%s): its worker is dropped", worker.key, error)
            answers, ended = [], True
        if ended:
            if worker.request is not None and not worker.hung:
                answers.append(
                    Answer(worker.request, worker.key, None, "the child ended", False, now - worker.asked_at)
                )
            worker.sock.close()
            del self._workers[worker.key]
        return [answer for answer in answers if answer is not None]

    def _take(self, worker: _Worker, reply: Any, now: float) -> Answer | None:
        request, value, error = reply
        if request != worker.request:
            return None
        was_hung, seconds = worker.hung, now - worker.asked_at
        worker.request, worker.hung, worker.used_at = None, False, now
        if was_hung:
            log.warning("%s answered after %.0f s: it is free again", worker.key, seconds)
            return None
        return Answer(request, worker.key, value, error, False, seconds)


def _hand_over(answer: Answer, then: Then | None) -> None:
    try:
        if then is not None:
            then(answer)
    except Exception:
        log.exception("the answer of %s could not be used", answer.key)


# ---------------------------------------------------------------------------------------------- in the children


def _child_main(work: Callable[[], None]) -> None:
    """Runs `work` in a process that was just forked, and never returns into the parent's code."""
    try:
        work()
    except BaseException:  # a forked child must not run its parent's handlers
        log.exception("a child of the agent failed")
    finally:
        os._exit(0)


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _spawn_for_ever(control: socket.socket, functions: Mapping[str, Function], parent: int) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's; its end ends us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the workers
    signal.set_wakeup_fd(-1)
    _die_with_parent(parent)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        key, uid = json.loads(message)
        _fork_worker(control, fds, key, uid, functions)


def _fork_worker(
    control: socket.socket, fds: list[int], key: str, uid: int, functions: Mapping[str, Function]
) -> None:
    me = os.getpid()
    if os.fork() == 0:
        control.close()
        _child_main(lambda: _work_for_ever(fds[0], key, uid, functions, me))
    for fd in fds:
        os.close(fd)


def _work_for_ever(fd: int, key: str, uid: int, functions: Mapping[str, Function], parent: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    refusal = _become(uid)
    _die_with_parent(parent)  # after the change of user, which resets it
    os.chdir("/")
    state: dict[str, Any] = {"key": key}
    with socket.socket(fileno=fd) as sock:
        inbox = bytearray()
        while data := sock.recv(1 << 18):
            inbox += data
            for request, function, args in _unframe(inbox):
                sock.sendall(
                    _frame([request, *_call(functions.get(function), function, args, state, refusal)])
                )


def _call(
    function: Function | None, name: str, args: Any, state: dict[str, Any], refusal: str | None
) -> tuple[Any, str | None]:
    if refusal is not None:
        return None, refusal
    if function is None:
        return None, f"no function {name!r}"
    try:
        return function(args, state), None
    except OSError as error:
        return None, describe(error)
    except Exception as error:
        log.exception("%s failed in a child", name)
        return None, f"{type(error).__name__}: {error}"


def describe(error: OSError) -> str:
    """`EACCES: Permission denied: '/x'`: the name of the error, which people search for, and its words."""
    name = errno.errorcode.get(error.errno or 0, "error")
    where = f": {error.filename!r}" if error.filename is not None else ""
    return f"{name}: {error.strerror or error}{where}"


def _become(uid: int) -> str | None:
    """Turns this process into user `uid` for good (-1: stays what it is); returns why it can't, None if it did."""
    if uid < 0 or uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        return f"the agent runs as uid {os.geteuid()} and can't read or write as uid {uid}"
    try:
        entry = pwd.getpwuid(uid)
        gid, groups = entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:
        gid, groups = uid, [uid]
    try:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        return f"can't become uid {uid}: {describe(error)}"
    if 0 in os.getresuid():
        return f"can't become uid {uid}: the kernel kept uid 0"
    return None


def _frame(value: Any) -> bytes:
    data = json.dumps(value, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME:
        data = json.dumps([value[0], None, f"an answer of {len(data)} bytes is too large"]).encode()
    return struct.pack("=I", len(data)) + data


def _unframe(inbox: bytearray) -> list[Any]:
    """Takes every complete frame out of `inbox`."""
    values = []
    while len(inbox) >= 4:
        (size,) = struct.unpack_from("=I", inbox)
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME} are taken")
        if len(inbox) < 4 + size:
            break
        values.append(json.loads(bytes(inbox[4 : 4 + size])))
        del inbox[: 4 + size]
    return values
