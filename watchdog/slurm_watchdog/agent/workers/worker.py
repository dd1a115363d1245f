"""One child as the agent sees it: its request, its answer, and what the agent that this process becomes inherits."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from slurm_watchdog.agent.proc.files import read_file, read_stat
from slurm_watchdog.agent.proc.system_call import parse_syscall
from slurm_watchdog.agent.workers.answer_types import ThreadFacts
from slurm_watchdog.agent.workers.request_types import Request, answer_type
from slurm_watchdog.knowledge.syscalls import FD_ARGUMENT, NOT_A_FILESYSTEM_WAIT, PATH_ARGUMENT, name_of

APART_S = 1.0  # Between two looks, and before the first: who is asked a moment ago works.
_OF_FILES = (FD_ARGUMENT.keys() | PATH_ARGUMENT.keys() | {"sync"}) - NOT_A_FILESYSTEM_WAIT
_MACHINE = os.uname().machine

STOPPED = "its child was stopped: no answer"
STARVED = "its child got no CPU, or did not stop computing: no answer"
ENDED = "its child was ended: no answer"


@dataclass(frozen=True)
class Look:
    """One look at a child."""

    at: float
    state: str  # The letter of /proc/PID/stat; empty: it is gone.
    cpu_ticks: int = 0
    call: str = ""  # The line of /proc/PID/syscall; empty where it cannot be read.


def look_at(pid: int, start_ticks: int, now: float) -> Look:
    """State and CPU time, which everybody may read, and the call, which only some may. Never blocks."""
    try:
        stat = read_stat(pid)
    except (OSError, ValueError):
        return Look(now, "")
    if stat.start_ticks != start_ticks:
        return Look(now, "")
    try:
        call = read_file(f"/proc/{pid}/syscall").decode("ascii", "replace")
    except OSError:
        call = ""
    return Look(now, stat.state, stat.cpu_ticks, call)


def start_of(pid: int) -> int:
    """Its start in clock ticks after boot; -1 where it is gone."""
    try:
        return read_stat(pid).start_ticks
    except (OSError, ValueError):
        return -1


def why_no_answer(look: Look) -> str | None:
    """Why a child in this state says nothing about its resource; None where it may stand in a call."""
    if look.state in ("T", "t"):
        return STOPPED
    if look.state in ("", "Z", "X", "x"):
        return ENDED
    return STARVED if look.state == "R" else None


def hangs_in_call(first: Look, second: Look) -> bool:
    """Whether it has stood in one call about files from the first look to the second, without computing."""
    call = parse_syscall(second.call.encode())
    if call is None or call.number < 0 or first.call != second.call:
        return False
    if second.at - first.at < APART_S or second.cpu_ticks - first.cpu_ticks > 1:
        return False
    return first.state in "DS" and second.state in "DS" and name_of(call.number, _MACHINE) in _OF_FILES


log = logging.getLogger(__name__)

IDLE_S = 600.0
IDLE_OF_KIND_S = {"identify": 30.0, "stacks": 20.0, "probe": 5.0}
"""An idle child costs about 3 MiB, starting one about 2 ms: what is needed less than once a minute does not
wait for work."""
READ_SIZE = 1 << 16
MAX_READS = 256  # Of READ_SIZE, from one child in one go: one that never stops talking does not hold up the loop.


Value = TypeVar("Value")


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """What became of one request: `error` is None if, and only if, the function returned `value`."""

    request: int
    key: str
    value: Value | None = None
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0


class HungWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A child that had not answered when its agent ended: for as long as it is there, its resource is not touched."""

    key: str
    uid: int
    asked_at: float
    deadline: float
    hung: bool
    pid: int
    start_ticks: int
    helped: bool = False


Then = Callable[[Answer[Any]], None]
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
    request: int | None = None  # Number of the one that it is busy with.
    request_type: type[Request[Any]] | None = None  # None: an agent before this one asked.
    former: bool = False  # It is a child of an agent before this one: no answer comes, it ends when it returns.
    asked_at: float = 0.0
    deadline: float = 0.0
    hung: bool = False
    born: bool = False  # It has reported its start: from now on its resource is to blame if it hangs, not its spawner.
    pid: int = 0
    start_ticks: int = -1  # Its own, as it has reported; 0 and -1: not known.
    helped: bool = False  # It is a child of the helper.
    first_look: Look | None = None
    last_look: Look | None = None  # What it does instead of answering: in its present call first, and now.
    looked_at: float = 0.0  # When the newest look was taken, which the helper may not have completed yet.
    running: int = 0  # Looks in a row in which it was running: one alone is also that of a driver that polls.
    proven: bool = False  # It has answered, so children can be started.
    then: Then | None = None
    on_part: OnPart | None = None


def record_look(worker: Worker, look: Look) -> None:
    """Keeps one look; with another call than before it is the first."""
    first = worker.first_look
    worker.running = worker.running + 1 if look.state == "R" else 0
    if first is None or first.call != look.call or first.state not in ("D", "S"):
        worker.first_look = look
    worker.last_look = look


def is_stuck(worker: Worker) -> bool:
    """Whether it was seen to hang in a call that does not return."""
    first, last = worker.first_look, worker.last_look
    return worker.request is not None and first is not None and last is not None and hangs_in_call(first, last)


def recall(each: HungWorker, request: int, now: float) -> Worker:
    """The worker of an agent before this one, busy with a `request` that no one waits for."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # In place of its own, which is closed: nothing ever comes.
    sock.setblocking(False)
    known = msgspec.structs.asdict(each)
    return Worker(sock=sock, used_at=now, idle_s=0.0, request=request, former=True, born=True, **known)


def is_over(worker: Worker) -> bool:
    """Whether a child of an agent before this one has returned, and ended."""
    return worker.former and start_of(worker.pid) != worker.start_ticks


def idle_s_of(key: str) -> float:
    """Seconds for which an idle child of this key is kept."""
    return IDLE_OF_KIND_S.get(key.partition(":")[0], IDLE_S)


def group_of(key: str) -> str:
    """The resource of a key: `files:/shared` of `files:/shared:1000`, `identify` of `identify:4711`."""
    return key.rpartition(":")[0] or key


def read_into(worker: Worker, buffer: memoryview) -> bool:
    """Reads what the child has sent into its inbox; False at its end. `buffer` is only passed through."""
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


def decode_answer(worker: Worker, value: Any, error: Any) -> tuple[Any, str | None]:
    """Value and error of the answer to its request; one of another type than the request names is an error."""
    if error is not None or worker.request_type is None:
        return None, str(error)
    try:
        return msgspec.convert(value, answer_type(worker.request_type)), None
    except msgspec.ValidationError as problem:
        log.error("%s gave an invalid answer to %s: %s", worker.key, worker.request_type.task, problem)
        return None, f"its answer is invalid: {problem}"


def deliver_part(worker: Worker, part: Any) -> None:
    """Calls `on_part` with a part of the answer; one of another type than the request names is dropped."""
    if worker.hung or worker.on_part is None or worker.request_type is None:
        return
    try:
        value = msgspec.convert(part, worker.request_type.part)
    except msgspec.ValidationError as problem:
        log.error("%s sent an invalid part of %s: %s", worker.key, worker.request_type.task, problem)
        return
    call_back(worker.key, worker.on_part, value)


def finish(worker: Worker, value: Any, error: str | None, now: float, done: set[int]) -> None:
    """Hands over the answer of a request, whose number goes into `done`; the worker is free again."""
    request, then = worker.request, worker.then
    assert request is not None
    worker.request, worker.then, worker.on_part, worker.used_at = None, None, None, now
    done.add(request)
    answer = Answer(request, worker.key, value, error, False, max(0.0, now - worker.asked_at))
    call_back(worker.key, then, answer)


def call_back(key: str, to: Callable[[Any], None] | None, value: Any) -> None:
    """Calls `to`, if there is one; what it raises is logged, and no more."""
    try:
        if to is not None:
            to(value)
    except Exception:
        log.exception("the answer of %s could not be used", key)


STARVED_LOOKS = 3  # In a row, before a hung child counts as one without CPU: with a second between them.
RESTED_S = 5.0  # A hung child is left so long after its deadline before it counts as one without CPU.
LOOK_AT_CHILDREN = "look:children"  # Reads, for an agent without rights, the calls of the helper's children.

CallThen = Callable[[Answer[list[ThreadFacts | None]]], None]
AskForCall = Callable[[int, CallThen, float], object]
"""Given a pid, what to do with the answer, and now: requests the call in which that process is."""


def watch_at_work(worker: Worker, now: float, ask_for_call: AskForCall | None) -> None:
    """One look at a child that has been at work for a while; what only the helper may see of it is asked for.
    `ask_for_call` None: this agent sees the calls of all its children by itself."""
    if not worker.born or worker.pid <= 0 or now - max(worker.looked_at, worker.asked_at) < APART_S:
        return
    worker.looked_at = now
    look = look_at(worker.pid, worker.start_ticks, now)
    seen = look.call or look.state not in ("D", "S")
    if seen or ask_for_call is None or worker.key == LOOK_AT_CHILDREN:
        record_look(worker, look)
    else:  # in a call that only the helper may see: a look without it would count as another call
        ask_for_call(worker.pid, partial(_apply_call, worker, worker.request, look), now)


def why_silent(worker: Worker, now: float) -> str | None:
    """Why a child that has passed its deadline says nothing about its resource; None where it may hang on it."""
    if not worker.born or worker.pid <= 0:
        return None
    why = why_no_answer(look_at(worker.pid, worker.start_ticks, now))
    seen_waiting = worker.last_look is not None and not worker.running
    return None if why == STARVED and seen_waiting else why


def why_given_up(worker: Worker, now: float) -> str | None:
    """Why a hung child, stopped meanwhile or computing again, is to be ended, for a fresh one; else None."""
    look = worker.last_look
    if not worker.born or look is None or look.at != now or (why := why_no_answer(look)) is None:
        return None
    if why == STARVED and (now - worker.deadline < RESTED_S or worker.running < STARVED_LOOKS):
        return None  # it may be about to answer, or polls in a call that does not return
    return why


def _apply_call(worker: Worker, request: int | None, look: Look, answer: Answer[list[ThreadFacts | None]]) -> None:
    found = (answer.value or [None])[0]
    if found is not None and found.call is not None and worker.request == request:
        record_look(worker, replace(look, call=found.call.line))
