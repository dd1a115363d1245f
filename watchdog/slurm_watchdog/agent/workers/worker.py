"""One child as the agent sees it: what it was asked, what has come of it, and what goes over to the agent
that this process becomes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slurm_watchdog.agent.workers.child_state import Look, stands

log = logging.getLogger(__name__)

IDLE_S = 600.0
IDLE_OF_KIND_S = {"identify": 30.0, "stacks": 20.0, "probe": 5.0}
"""An idle child costs about 3 MiB, starting one about 2 ms: what is needed less than once a minute does not
wait for work."""
READ_SIZE = 1 << 16
MAX_READS = 256
"""Of READ_SIZE, from one child in one go: one that never stops talking does not hold up the loop."""


@dataclass(frozen=True)
class Answer:
    """What became of one request: `error` is None if, and only if, the function returned `value`."""

    request: int
    key: str
    value: Any = None
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0


class InheritedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A child that had something to do when its agent became a new one: who it is, and what has gone to and
    fro until then."""

    key: str
    uid: int
    fd: int
    """Its socket, which exec leaves open."""
    request: int
    asked_at: float
    deadline: float
    hung: bool
    born: bool
    inbox: bytes = b""
    outbox: bytes = b""
    pid: int = 0
    start_ticks: int = -1
    helped: bool = False


Then = Callable[[Answer], None]
OnPart = Callable[[Any], None]


@dataclass
class Worker:
    """The agent's end of one child."""

    key: str
    uid: int
    sock: socket.socket
    used_at: float
    idle_s: float
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    writing: bool = False
    request: int | None = None
    asked_at: float = 0.0
    deadline: float = 0.0
    hung: bool = False
    born: bool = False
    """It has said that it has begun: what does not come back from now on is its resource's fault, not its spawner's."""
    pid: int = 0
    start_ticks: int = -1
    """Its own, as it has said when it began; 0 and -1: not known."""
    helped: bool = False
    """It is a child of the helper."""
    first_look: Look | None = None
    last_look: Look | None = None
    """At what it does instead of answering: the first in its present call, and the newest."""
    looked_at: float = 0.0
    """When the newest look was taken, which the helper may not have completed yet."""
    running: int = 0
    """Looks in a row in which it was running or waiting for a CPU: one alone is also that of a driver that polls."""
    proven: bool = False
    """It has answered, so children can be started."""
    then: Then | None = None
    on_part: OnPart | None = None


def note_look(worker: Worker, look: Look) -> None:
    """Takes over one look; a call that is another than before begins anew."""
    first = worker.first_look
    worker.running = worker.running + 1 if look.state == "R" else 0
    if first is None or first.call != look.call or first.state not in ("D", "S"):
        worker.first_look = look
    worker.last_look = look


def is_stuck(worker: Worker) -> bool:
    """Whether it was seen to stand in a call that does not return."""
    first, last = worker.first_look, worker.last_look
    return worker.request is not None and first is not None and last is not None and stands(first, last)


def left_of(worker: Worker) -> InheritedWorker:
    """What the agent that this process becomes is told of one that is busy."""
    assert worker.request is not None
    return InheritedWorker(
        key=worker.key, uid=worker.uid, fd=worker.sock.fileno(), request=worker.request, asked_at=worker.asked_at,
        deadline=worker.deadline, hung=worker.hung, born=worker.born, inbox=bytes(worker.inbox), outbox=bytes(worker.outbox),
        pid=worker.pid, start_ticks=worker.start_ticks, helped=worker.helped,
    )  # fmt: skip


def adopt(left: InheritedWorker, now: float) -> Worker:
    """A worker of the agent before, of whom nobody waits for the answer any more."""
    sock = socket.socket(fileno=left.fd)
    sock.set_inheritable(False)
    sock.setblocking(False)
    return Worker(
        left.key, left.uid, sock, now, idle_s_of(left.key), bytearray(left.inbox),
        bytearray(left.outbox), request=left.request, asked_at=left.asked_at, deadline=left.deadline, hung=left.hung, born=left.born,
        pid=left.pid, start_ticks=left.start_ticks, helped=left.helped,
    )  # fmt: skip


def idle_s_of(key: str) -> float:
    """How long a child of this key is kept while nobody asks it anything."""
    return IDLE_OF_KIND_S.get(key.partition(":")[0], IDLE_S)


def group_of(key: str) -> str:
    """What hangs together: `files:/shared` of `files:/shared:1000`, `identify` of `identify:4711`."""
    return key.rpartition(":")[0] or key


def read_into(worker: Worker, buffer: memoryview) -> bool:
    """Takes what the child has said into its inbox; False at its end. `buffer` is only passed through."""
    for _ in range(MAX_READS):
        try:
            size = worker.sock.recv_into(buffer)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not size:
            return False
        worker.inbox += buffer[:size]
        if size < READ_SIZE:
            return True  # that was all; more would be news to the waiter
    return True


def finish(worker: Worker, value: Any, error: str | None, now: float, done: set[int]) -> None:
    """Hands over the answer of a request, whose number goes into `done`; the worker is free again."""
    request, then = worker.request, worker.then
    assert request is not None
    worker.request, worker.then, worker.on_part, worker.used_at = None, None, None, now
    done.add(request)
    hand_over(
        worker.key, then, Answer(request, worker.key, value, error, False, max(0.0, now - worker.asked_at))
    )


def hand_over(key: str, to: Callable[[Any], None] | None, what: Any) -> None:
    """Calls `to`, if anybody waits; what it raises is logged, and no more."""
    try:
        if to is not None:
            to(what)
    except Exception:
        log.exception("the answer of %s could not be used", key)
