"""The agent's children: everything that could hang is done in one of them, with a deadline.

Each child is forked from this process, becomes one user (slurm_watchdog.agent.children.child) and serves one resource,
named by its key: `look:1000`, `files:/shared:1000`. One that misses its deadline is reported as hung, gets no new
requests and is not replaced until it answers; that answer is dropped, and it is free again. Where a child serves many
processes of which one hangs, `set_aside` leaves it under that one's name, and the others get a fresh child. Of each
user, so many may hang, and no more: the loop never waits for any, and other users' children are not concerned.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from slurm_watchdog.agent.children.become_user import Kind
from slurm_watchdog.agent.children.child import ANSWER, BEGUN, LEFT, Task, decode, decoder, fork_child, frame, unframe
from slurm_watchdog.agent.children.look import APART_S, Looks
from slurm_watchdog.agent.children.requests import PLACE, Request, answer_type
from slurm_watchdog.agent.proc.entry import parse_status
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import Waiter, wait_readable
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.observations import HungProbe

log = logging.getLogger(__name__)

MAX_CHILDREN = 64  # A node has a handful of mounts and users; more children would be an attack on the node.
KEPT_FREE = 12  # Places that no child of a user takes: for the GPUs, mounts, the node itself.
MAX_HUNG_OF_USER = 4  # Of one kind that are one user and hang, or have not answered anything yet: others are served.
MAX_OF_USER = 12  # That are one user: one for each mount with his files.
MAX_HUNG_OF_MOUNT = 8  # About one mount: the ninth would teach nothing new.
LIMITED_S = 60.0  # So long it is reported that a user was limited.
IDLE_S = 600.0
IDLE_OF_KIND_S = {"stacks": 20.0, "state": 5.0, "evidence": 5.0, "probe": 5.0, "node": 30.0}
"""An idle child costs about 3 MiB, starting one about 2 ms: what is needed less than once a minute does not
wait for work."""
PAUSE_S = 5.0  # Beyond a request's deadline: an agent that has not looked for so long was stopped itself.
GRACE_S = 1.0
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
    place: int = 0  # Of several processes in the request, the one that the child was about to look at last.


Then = Callable[[Answer[Any]], None]


class HungChild(msgspec.Struct, frozen=True, kw_only=True):
    """A child that had not answered when its agent ended: for as long as it is there, its resource is not touched. Or a
    program that one left behind, which counts as long as it is there."""

    key: str
    uid: int
    kind: Kind
    asked_at: float
    pid: int
    is_program: bool = False


@dataclass(eq=False)
class Child:
    """The agent's end of one child."""

    key: str
    uid: int
    kind: Kind
    pid: int
    sock: socket.socket | None  # None: it is a child of an agent before this one, and ends when it returns.
    place: mmap.mmap | None
    used_at: float
    idle_s: float
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    writing: bool = False
    request: int | None = None  # Number of the one that it is busy with.
    request_type: type[Request[Any]] | None = None
    asked_at: float = 0.0
    deadline: float = 0.0
    hung: bool = False
    begun: bool = False  # It has become its user: from now on its resource is to blame if it hangs.
    proven: bool = False  # It has answered.
    looks: Looks = field(default_factory=Looks)  # What it does instead of answering.
    then: Then | None = None

    @property
    def at(self) -> int:
        return int(PLACE.unpack_from(self.place)[0]) if self.place is not None else 0


class Children:
    """All children of this process. `now` is the monotonic clock of the caller."""

    def __init__(
        self,
        tasks: tuple[Task, ...],
        max_children: int = MAX_CHILDREN,
        read_clock: Callable[[], float] = clock.monotonic,
        former: Iterable[HungChild] = (),
        is_here: Callable[[int, float], bool] = lambda uid, now: True,
    ):
        """`tasks` are what children can do. `former` are children of the agent before this one that had not answered:
        none is replaced until it has ended. As a user of whom `is_here` is not true no child is started."""
        self.read_clock, self.is_here = read_clock, is_here
        self._tasks, self._max = tasks, max_children
        self._place = {task.request.task: index for index, task in enumerate(tasks)}
        self._children: dict[str, Child] = {}
        self._by_fd: dict[int, Child] = {}
        self._ended: set[int] = set()  # Pids that were let go, and have not been waited for.
        self._left: dict[int, tuple[int, int, float]] = {}
        """Pidfd of a program that a child left behind, killed in vain -> its user, its pid, since when."""
        self._limited: dict[int, float] = {}  # User -> when he was refused a child last.
        self._full_at = float("-inf")  # When some user was refused one for want of places.
        self._next_request, self._looked_at = 1, float("-inf")
        self._problem = ""  # Why no child can be started now.
        self._buffer = memoryview(bytearray(READ_SIZE))
        self._waiter = Waiter()
        for each in former:
            if each.is_program:
                if _is_stuck(each):
                    self._note_left(each.uid, [each.pid], each.asked_at)
                continue
            child = self._children[each.key] = Child(each.key, each.uid, each.kind, each.pid, None, None, 0.0, 0.0)
            child.request, child.asked_at, child.hung, child.begun = -1, each.asked_at, True, True
        gc.collect()
        gc.freeze()  # the collector writes into objects, and what is written to is shared with children no more

    def ask(
        self, key: str, request: Request[Value], deadline_s: float, now: float,
        then: Callable[[Answer[Value]], None], uid: int = -1, *, idle_s: float | None = None,
    ) -> int | None:  # fmt: skip
        """Gives `key`'s child a request; returns its number, or None if the child is busy, hung or unavailable.

        The child is started if there is none, and becomes `uid` (-1: it stays the agent's user, without rights). `then`
        is called once, by `poll` or `settle`: with the answer, or when the deadline has passed; an answer that comes
        after the deadline is dropped. The child ends when it has been idle for `idle_s` (0: as soon as it has answered;
        None: what suits its kind).
        """
        child = self._children.get(key)
        if child is not None and child.request is not None:
            return None
        if child is not None and child.uid != uid:
            self.retire(key)
            child = None
        if child is None:
            decoder(type(request))  # made here, its pages are shared with each child that needs it
            child = self._start(key, uid, self._tasks[self._place[request.task]].kind, now)
        if child is None:
            return None
        number, self._next_request = self._next_request, self._next_request % (2**31 - 1) + 1
        child.request, child.request_type = number, type(request)
        child.asked_at = child.used_at = now
        child.deadline, child.then, child.looks = now + deadline_s, then, Looks()
        child.idle_s = child.idle_s if idle_s is None else idle_s
        child.outbox += frame(number, self._place[request.task], request)
        self._flush(child)
        return number

    def poll(self, now: float) -> set[int]:
        """Delivers all answers that are there, and one with `timed_out` for each deadline that has just passed. Returns
        the numbers of the requests that are thereby done. What a `then` raises is logged, and no more."""
        done: set[int] = set()
        for fd in self._waiter.wait(0.0):
            if fd in self._by_fd:
                self._flush(self._by_fd[fd])
                self._receive(self._by_fd[fd], now, done)
        for child in list(self._children.values()):
            if child.sock is None:
                if not _is_there(child):
                    log.warning("%s: the child of the agent before has ended: it is free again", child.key)
                    self._drop(child)
            elif child.request is not None:
                self._watch(child, now, done)
            elif now - child.used_at >= child.idle_s:
                self._drop(child)
        self._bury()
        self._looked_at = now
        return done

    def settle(self, seconds: float, requests: Iterable[int]) -> None:
        """Waits at most `seconds` for the answers of `requests`, delivering all that come. Ask all that is to be asked
        first, and settle once for all: the children then work at the same time."""
        wanted = set(requests)
        end = self.read_clock() + seconds
        while wanted:
            now = self.read_clock()
            wanted -= self.poll(now)
            deadlines = [child.deadline for child in self._children.values() if child.request in wanted]
            if not deadlines or now >= end:
                return
            wait_readable([self._waiter.fileno()], min(end, *deadlines) - now)

    def is_free(self, key: str) -> bool:
        """Whether `ask` would give `key` something to do, as far as its own child goes."""
        child = self._children.get(key)
        return child is None or child.request is None

    def hung_since(self, key: str, now: float) -> float | None:
        """For how many seconds the hung child of `key` has been waiting; None if it is not hung, or never began."""
        child = self._children.get(key)
        return now - child.asked_at if child is not None and child.hung and child.begun else None

    def is_stuck(self, key: str) -> bool:
        """Whether the child of `key` was seen to hang in a call: only then it says anything about its resource."""
        child = self._children.get(key)
        return child is not None and child.begun and child.request is not None and child.looks.hangs_in_call

    def hung(self, now: float) -> tuple[HungProbe, ...]:
        """Every hung child, and each program that one left behind, the longest first; `start:KEY` is one that could not
        even begin."""
        found = [
            HungProbe(probe=child.key if child.begun else f"start:{child.key}", seconds=now - child.asked_at)
            for child in self._children.values()
            if child.hung
        ]
        found += [HungProbe(probe=_program_key(uid, pid), seconds=now - at) for uid, pid, at in self._left.values()]
        return tuple(sorted(found, key=lambda probe: -probe.seconds))

    def room(self, uid: int) -> int:
        """How many more programs that look into processes of this user may hang."""
        return MAX_HUNG_OF_USER - self._hung_of(uid, Kind.PROCESSES, hung_alone=True)

    def counts(self) -> dict[str, int]:
        """How many children are idle, busy and hung. May be called from any thread."""
        found = {"idle": 0, "busy": 0, "hung": len(self._left)}
        for child in list(self._children.values()):
            found["hung" if child.hung else "busy" if child.request is not None else "idle"] += 1
        return found

    def problems(self) -> tuple[str, ...]:
        """Why something was not asked, or will not be: a sentence each."""
        now, found = self._looked_at, list[str]()
        for mount, count in Counter(_mount_of(each.key) for each in self._children.values() if each.hung).items():
            if mount and count >= MAX_HUNG_OF_MOUNT:
                found.append(f"children: {count} of {mount} hang: no more of them are started")
        for uid in [uid for uid, at in self._limited.items() if now - at < LIMITED_S]:
            mine = sum(child.uid == uid and child.request is not None for child in self._children.values())
            busy = mine + self._left_of(uid)
            found.append(f"children: {busy} of uid {uid} hang or are busy: no more are started for this user")
        if now - self._full_at < LIMITED_S:
            users = sum(child.uid >= 0 for child in self._children.values())
            found.append(f"children: all {users} places for those of users are taken: some users' are not started")
        if len(self._children) >= self._max and all(child.request is not None for child in self._children.values()):
            found.append(f"children: all {len(self._children)} are busy or hang: nothing more is asked")
        return (*found, *((f"children: {self._problem}",) if self._problem else ()))

    def filenos(self) -> list[int]:
        """Descriptors that become readable when an answer comes, or a child ends."""
        return [self._waiter.fileno()]

    def pids(self) -> frozenset[int]:
        """All children, and what they left behind."""
        left = (pid for _, pid, _ in self._left.values())
        return frozenset((*(child.pid for child in self._children.values()), *self._ended, *left))

    def set_aside(self, key: str, new_key: str) -> bool:
        """Leaves the hung child of `key` under the name `new_key`: still reported, ended when it answers. `key` gets a
        fresh child with the next `ask`, if its user may have one more. False, with nothing changed, if the child is not
        hung, or if one that is busy or hung has that name already."""
        child = self._children.get(key)
        if child is None or not (child.hung and child.begun) or not self.is_free(new_key):
            return False
        self.retire(new_key)
        del self._children[key]
        child.key, child.idle_s = new_key, 0.0
        self._children[new_key] = child
        return True

    def retire(self, key: str) -> None:
        """Ends the child of `key` unless it has something to do: it sees the end of its socket and exits."""
        child = self._children.get(key)
        if child is not None and child.request is None:
            self._drop(child)

    def names(self) -> list[str]:
        """Keys of all children."""
        return list(self._children)

    def adopt(self) -> None:
        """At the start of the process, before it has started anything: what an agent before it in this process has left
        behind is waited for, else each reload would leave as many zombies as it had children."""
        with suppress(OSError, ValueError):  # a kernel without that file, or a process that is being traced
            left = set(map(int, read_file(f"/proc/self/task/{os.getpid()}/children").split()))
            self._ended |= left - {each.pid for each in self._children.values()}

    def unanswered(self, now: float) -> tuple[HungChild, ...]:
        """Those that hang, or have been at work for a while, for the next agent: after `close` they end as soon as
        they return; and the programs that they left behind."""
        mine = (child for child in self._children.values() if child.request is not None and child.begun)
        hung = (picked(HungChild, child) for child in mine if child.hung or now - child.asked_at >= APART_S)
        programs = (
            HungChild(key=_program_key(uid, pid), uid=uid, kind=Kind.PROCESSES, asked_at=at, pid=pid, is_program=True)
            for uid, pid, at in self._left.values()
        )
        return (*hung, *programs)

    def close(self) -> None:
        """Ends all children; those in the kernel's uninterruptible sleep end when that does."""
        for child in list(self._children.values()):
            if child.request is None or child.sock is None:
                self._drop(child)
            else:
                self._end(child)
        for pidfd in self._left:
            os.close(pidfd)
        self._left.clear()
        self._waiter.close()
        self._bury()

    # -- who may be started ------------------------------------------------------------------------------------

    def _start(self, key: str, uid: int, kind: Kind, now: float) -> Child | None:
        if not self._may_start(key, uid, kind, now):
            return None
        try:
            pid, sock, place = fork_child(key, uid, kind, self._tasks)
        except OSError as error:  # too many processes or descriptors, or no memory: it is asked again later
            self._problem = f"none can be started: {describe(error)}"
            return None
        self._problem = ""
        idle_s = IDLE_OF_KIND_S.get(key.partition(":")[0], IDLE_S)
        child = self._children[key] = Child(key, uid, kind, pid, sock, place, now, idle_s)
        self._by_fd[sock.fileno()] = child
        self._waiter.watch(sock.fileno())
        return child

    def _may_start(self, key: str, uid: int, kind: Kind, now: float) -> bool:
        """Whether a child may be started for `key` as `uid`; ends an idle one where that makes room."""
        mount = _mount_of(key)
        hung = (each for each in self._children.values() if each.hung)
        if mount and sum(_mount_of(each.key) == mount for each in hung) >= MAX_HUNG_OF_MOUNT:
            return False
        if uid >= 0 and not self._may_have(uid, kind, now):
            return False
        users = [child for child in self._children.values() if child.uid >= 0]
        if uid >= 0 and len(users) >= self._max - min(KEPT_FREE, self._max // 4):
            has_room = self._make_room(users)
            self._full_at = self._full_at if has_room else now
            return has_room
        return len(self._children) < self._max or self._make_room(self._children.values())

    def _may_have(self, uid: int, kind: Kind, now: float) -> bool:
        """Whether this user may have one more child. Who has none may always: places run out for those who hang."""
        if not self.is_here(uid, now):
            return False
        mine = [child for child in self._children.values() if child.uid == uid]
        few = self._hung_of(uid, kind) < MAX_HUNG_OF_USER
        if few and (len(mine) < MAX_OF_USER or self._make_room(mine)):
            return True
        self._limited = {each: at for each, at in self._limited.items() if now - at < LIMITED_S} | {uid: now}
        return False

    def _hung_of(self, uid: int, kind: Kind, hung_alone: bool = False) -> int:
        mine = (child for child in self._children.values() if child.uid == uid and child.kind is kind)
        hung = sum(child.hung or not (hung_alone or child.proven) for child in mine)
        return hung + (self._left_of(uid) if kind is Kind.PROCESSES else 0)

    def _left_of(self, uid: int) -> int:
        return sum(each == uid for each, _, _ in self._left.values())

    def _make_room(self, among: Iterable[Child]) -> bool:
        idle = [child for child in among if child.request is None]
        if idle:
            self._drop(min(idle, key=lambda child: child.used_at))
        return bool(idle)

    # -- what comes --------------------------------------------------------------------------------------------

    def _flush(self, child: Child) -> None:
        assert child.sock is not None
        while child.outbox:
            try:
                del child.outbox[: child.sock.send(child.outbox)]
            except BlockingIOError:
                break
            except OSError:
                child.outbox.clear()  # its end is seen when reading
        if child.writing != bool(child.outbox):
            child.writing = bool(child.outbox)
            self._waiter.watch(child.sock.fileno(), writing=child.writing)

    def _receive(self, child: Child, now: float, done: set[int]) -> None:
        ended = not self._read_into(child)
        try:
            for number, letter, body in unframe(child.inbox):
                self._take(child, number, letter, body, now, done)
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("%s sent an invalid answer (%s): it is ended", child.key, error)
            ended = True
        if ended and self._children.get(child.key) is child:
            was_busy = child.request is not None and not child.hung
            self._drop(child)
            if was_busy:
                self._finish(child, None, "the child ended", now, done)

    def _read_into(self, child: Child) -> bool:
        """Reads what the child has sent; False at its end."""
        assert child.sock is not None
        for _ in range(MAX_READS):
            try:
                size = child.sock.recv_into(self._buffer)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not size:
                return False
            child.inbox += self._buffer[:size]
            if size < READ_SIZE:
                return True  # that was all; more would be news to the waiter
        return True

    def _take(self, child: Child, number: int, letter: int, body: bytes, now: float, done: set[int]) -> None:
        """Takes one frame. Raises ValueError for what is none."""
        if letter == BEGUN:
            child.begun = True
        elif letter == LEFT:
            self._note_left(child.uid, decode(body, list[int]), now)
        elif child.request != number or child.request_type is None:
            pass  # of a request that is over
        elif child.hung:
            log.warning("%s answered after %.0f s: it is free again", child.key, now - child.asked_at)
            child.request, child.hung, child.proven, child.used_at = None, False, True, now
        else:
            child.proven = True
            value, error = None, None
            if letter == ANSWER:
                try:
                    value = decode(body, answer_type(child.request_type))
                except msgspec.ValidationError as problem:
                    log.error("%s: invalid answer to %s: %s", child.key, child.request_type.task, problem)
                    error = f"its answer is invalid: {problem}"
            else:
                error = decode(body, str)
            self._finish(child, value, error, now, done)

    def _finish(self, child: Child, value: Any, error: str | None, now: float, done: set[int]) -> None:
        """Hands over the answer of a request, whose number goes into `done`; the child is free again."""
        number, then = child.request, child.then
        assert number is not None
        child.request, child.then, child.used_at = None, None, now
        done.add(number)
        _hand_over(then, Answer(number, child.key, value, error, False, max(0.0, now - child.asked_at), child.at))

    def _watch(self, child: Child, now: float, done: set[int]) -> None:
        if child.begun:
            child.looks.take(child.pid, child.asked_at, now)
        if now >= child.deadline and not child.hung:
            self._miss_deadline(child, now, done)
        elif child.hung and child.begun and (why := child.looks.why_given_up(child.deadline, now)) is not None:
            log.warning("%s: %s", child.key, why)
            self._end(child)

    def _miss_deadline(self, child: Child, now: float, done: set[int]) -> None:
        """Marks a child beyond its deadline as hung, unless this process itself was stopped."""
        if now - max(self._looked_at, child.asked_at) > child.deadline - child.asked_at + PAUSE_S:
            child.deadline = now + GRACE_S
            return
        why = child.looks.why_silent(child.pid, now)
        if why is not None:
            log.warning("%s: %s", child.key, why)
            self._end(child)
            self._finish(child, None, why, now, done)
            return
        number, then, waited = child.request, child.then, now - child.asked_at
        assert number is not None
        child.hung, child.then = True, None
        done.add(number)
        if child.begun:
            log.warning("%s has not answered for %.1f s: no new requests until it does", child.key, waited)
            error = f"no answer within {waited:.0f} s"
        else:  # the directory of users is at fault: nothing is known of what it was to look at
            log.warning("%s has not begun within %.1f s: no new requests until it does", child.key, waited)
            error = f"its child was not started within {waited:.0f} s"
        _hand_over(then, Answer[Any](number, child.key, None, error, child.begun, waited, child.at))

    # -- ends --------------------------------------------------------------------------------------------------

    def _drop(self, child: Child) -> None:
        del self._children[child.key]
        if child.sock is not None:
            self._waiter.forget(child.sock.fileno())
            del self._by_fd[child.sock.fileno()]
            child.sock.close()
        self._ended.add(child.pid)

    def _end(self, child: Child) -> None:
        """Kills the child and closes its socket; one that cannot be killed finds that when it continues."""
        try:
            os.kill(child.pid, signal.SIGKILL)  # its number is its own until it is waited for
        except OSError as error:
            log.warning("%s: it cannot be ended: %s", child.key, describe(error))
        if self._children.get(child.key) is child:
            self._drop(child)

    def _bury(self) -> None:
        for pid in list(self._ended):
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            except ChildProcessError:  # of an agent before this one
                pass
            self._ended.discard(pid)
        for pidfd in wait_readable(self._left, 0.0) if self._left else ():
            os.close(pidfd)
            del self._left[pidfd]

    def _note_left(self, uid: int, pids: list[int], now: float) -> None:
        for pid in pids:
            with suppress(OSError):  # it has ended meanwhile
                self._left[os.pidfd_open(pid)] = (uid, pid, now)


def _program_key(uid: int, pid: int) -> str:
    return f"stacks:{uid}:{pid}"


def _is_stuck(program: HungChild) -> bool:
    """Whether a program that an agent before this one could not end still has this number: in D, as its user."""
    try:
        status = parse_status(read_file(f"/proc/{program.pid}/status"))
    except (OSError, ValueError):
        return False
    return status.state == "D" and status.real_uid == program.uid


def _mount_of(key: str) -> str:
    """What several users' children may hang on: the mount in `files:/shared:1000` and `probe:/shared`."""
    kind, _, rest = key.partition(":")
    return f"{kind}:{rest.rpartition(':')[0] or rest}" if kind in ("files", "probe") else ""


def _is_there(child: Child) -> bool:
    """Whether a child of an agent before this one still is: by its name, which takes no lock of whoever has its number
    now."""
    try:
        if os.waitpid(child.pid, os.WNOHANG)[0] == child.pid:
            return False
    except ChildProcessError:
        pass  # that agent was another process
    try:
        return read_file(f"/proc/{child.pid}/status").startswith(b"Name:\tswd ")
    except OSError:
        return False


def _hand_over(then: Then | None, answer: Answer[Any]) -> None:
    try:
        if then is not None:
            then(answer)
    except Exception:
        log.exception("the answer of %s could not be used", answer.key)
