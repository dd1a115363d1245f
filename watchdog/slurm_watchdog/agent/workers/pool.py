"""Disposable children: everything that could hang is done in one of them, with a deadline.

A small process, the spawner, is forked before the agent has any thread. On request it forks workers that share its
memory; each worker serves one resource, named by its key (`identify`, `stacks`, `files:/shared:1000`). A worker that
misses its deadline is left alone: it is reported as hung, gets nothing more to do and is not replaced, until it answers;
that answer is dropped, and the worker is free again. The agent's loop never waits for any of them.

Where one worker serves many things of which one hangs (processes to identify), it tells what it has found piece by piece, so
that its asker knows which one it was; `rename` then sets it aside under that one's name, and the others get a fresh worker.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from slurm_watchdog.agent.workers.become_user import refusal_as
from slurm_watchdog.agent.workers.child import (
    Function,
    Functions,
    child_main,
    describe,
    encode,
    frame,
    spawn_for_ever,
    unframe,
)
from slurm_watchdog.agent.workers.child_state import APART_S, STARVED, Look, look_at, start_of, why_no_answer
from slurm_watchdog.agent.workers.helper_client import HelperLink
from slurm_watchdog.agent.workers.worker import (
    READ_SIZE,
    Answer,
    InheritedWorker,
    OnPart,
    Then,
    Worker,
    adopt,
    finish,
    group_of,
    hand_over,
    idle_s_of,
    is_stuck,
    left_of,
    note_look,
    read_into,
)
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import Waiter, wait_readable
from slurm_watchdog.model.observations import HungProbe

__all__ = ["Answer", "Function", "InheritedWorker", "SpawnerDied", "Then", "WorkerPool", "describe"]

log = logging.getLogger(__name__)

MAX_WORKERS = 48
"""A node has a handful of mounts and users; more children than this would be an attack on the node by the watchdog."""
MAX_HUNG_OF_GROUP = 8
"""And so many about one mount, or of one kind: the ninth process whose memory is locked would teach nothing new."""
MAX_HUNG_OF_USER = 4
"""Children that are one user and hang, or have not answered anything yet: whatever he mounts or locks, the others are served."""
MAX_OF_USER = 12
"""Children that are one user: one for each mount with his files."""
KEPT_FREE = 12
"""Places that no child of a user takes: for who identifies processes, reads stacks, GPUs and the kernel's log."""
LIMITED_S = 60.0
"""So long it is said that a user was limited."""
STARVED_LOOKS = 3
"""In a row, before a hung child counts as one without CPU: with a second between them."""
PAUSE_S = 5.0
"""Beyond a request's deadline: an agent that has not looked for so long was stopped itself, and its children with it perhaps."""
GRACE_S = 1.0
LOOK_AT_CHILDREN, LOOK_S = "look:children", 5.0
"""Who sees for an agent without rights in which call a child of the helper stands; deadline of one look."""


class SpawnerDied(Exception):
    """The spawner is gone: no child can be started any more, the agent has to be started anew."""


class WorkerPool:
    """The pool of workers. `now` is the monotonic clock of the caller."""

    def __init__(
        self,
        functions: Functions,
        max_workers: int = MAX_WORKERS,
        read_clock: Callable[[], float] = clock.monotonic,
        helper: HelperLink | None = None,
        helped: Collection[str] = (),
        left: Iterable[InheritedWorker] = (),
    ):
        """Forks the spawner: to be made before any thread. `functions` are what workers can do, by name.

        Those in `helped` are done by children of the `helper`, if there is one: the same workers, with its rights. `left` are the
        children of the agent that this process was before: each is waited for, and not replaced until it has come back or ended.
        """
        self.helper = helper
        self._helped = frozenset(helped) if helper is not None else frozenset[str]()
        self.read_clock = read_clock
        self._max_workers = max_workers
        self._workers: dict[str, Worker] = {}
        self._by_fd: dict[int, Worker] = {}
        self._next_request = 1
        self._no_start = ""
        self._limited: dict[int, float] = {}
        """User -> when he was refused a child last."""
        self._lost = False
        self._buffer = memoryview(bytearray(READ_SIZE))
        self._looked_at = float("-inf")
        adopted = [adopt(each, read_clock()) for each in left]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        gc.collect()
        gc.freeze()  # the collector writes into objects, and what is written to is shared no more
        self.spawner_pid = os.fork()
        if self.spawner_pid == 0:
            ours.close()
            child_main(lambda: spawn_for_ever(theirs, functions, parent, [each.sock for each in adopted]))
        theirs.close()
        ours.setblocking(False)  # the spawner only forks; were it to stop, the agent must not
        self._control = ours
        self._waiter = Waiter()
        self._waiter.watch(ours.fileno())
        for worker in adopted:
            self._workers[worker.key] = self._by_fd[worker.sock.fileno()] = worker
            self._next_request = max(self._next_request, (worker.request or 0) + 1)
            self._waiter.watch(worker.sock.fileno())
            self._flush(worker)

    def ask(  # noqa: PLR0913 -- one call says all about one request
        self, key: str, function: str, args: Any, deadline_s: float, now: float, then: Then, uid: int = -1,
        *, on_part: OnPart | None = None, idle_s: float | None = None,
    ) -> int | None:  # fmt: skip
        """Gives `key`'s worker something to do; returns the request's number, or None if it is busy, hung or can't be had.

        The worker is started if there is none; with `uid` it becomes that user first. `then` is called once, by `poll` or
        `settle`: with the answer, or when the deadline has passed. Before that `on_part` is called with each part that the
        function tells ahead; those that come after the deadline are dropped, as the answer is. The worker ends when it has
        been idle for `idle_s` (0: as soon as it has answered; None: what suits its kind). Raises ProbesLost if no worker can
        be started ever again.
        """
        worker = self._workers.get(key)
        if worker is not None and worker.request is not None:
            return None
        if worker is not None and worker.uid != uid:
            self.retire(key)
            worker = None
        if worker is None:
            worker = (
                self._start(key, uid, now, function in self._helped)
                if self._may_start(key, uid, now)
                else None
            )
        if worker is None:
            return None
        request, self._next_request = self._next_request, self._next_request + 1
        worker.request, worker.asked_at, worker.deadline = request, now, now + deadline_s
        worker.used_at, worker.then, worker.on_part = now, then, on_part
        worker.first_look = worker.last_look = None
        worker.running = 0
        if idle_s is not None:
            worker.idle_s = idle_s
        worker.outbox += frame([request, function, args])
        self._flush(worker)
        return request

    def poll(self, now: float) -> set[int]:
        """Hands out all answers that are there, and one with `timed_out` for each deadline that has passed just now.

        Returns the numbers of the requests that are thereby done. What a `then` raises is logged, and no more.
        """
        done: set[int] = set()
        for fd in self._waiter.wait(0.0):
            worker = self._by_fd.get(fd)
            if worker is not None:
                self._flush(worker)
                self._receive(worker, now, done)
            self._lost |= fd == self._control.fileno()
            if self.helper is not None and self.helper.sock is not None and fd == self.helper.sock.fileno():
                self._lose_helper("it has ended the connection")  # it says nothing else
        for worker in list(self._workers.values()):
            if worker.request is not None:
                self._look_at(worker, now)
                if now >= worker.deadline and not worker.hung:
                    self._judge(worker, now, done)
                elif worker.hung:
                    self._give_up_idle(worker, now)
            elif now - worker.used_at >= worker.idle_s:
                self._drop(worker)
        self._looked_at = now
        return done

    def settle(self, seconds: float, requests: Iterable[int]) -> None:
        """Waits at most `seconds` for the answers of `requests`, handing out whatever comes.

        Ask all that is to be asked first, and settle once for all: the children then work at the same time.
        """
        wanted = set(requests)
        end = self.read_clock() + seconds
        while True:
            now = self.read_clock()
            wanted -= self.poll(now)
            deadlines = [worker.deadline for worker in self._workers.values() if worker.request in wanted]
            if not deadlines or now >= end or self._lost:
                return
            wait_readable([self._waiter.fileno()], min(end, *deadlines) - now)

    def is_free(self, key: str) -> bool:
        """Whether `ask` would give `key` something to do, as far as its own worker goes."""
        worker = self._workers.get(key)
        return worker is None or worker.request is None

    def hung_since(self, key: str, now: float) -> float | None:
        """For how many seconds the hung worker of `key` has been waiting; None if it is not hung, or was never started."""
        worker = self._workers.get(key)
        return now - worker.asked_at if worker is not None and worker.hung and worker.born else None

    def is_stuck(self, key: str) -> bool:
        """Whether the worker of `key` was seen to stand in a call that does not return: only then it says anything about its resource."""
        worker = self._workers.get(key)
        return worker is not None and worker.born and is_stuck(worker)

    def hung(self, now: float) -> tuple[HungProbe, ...]:
        """Every child that did not come back, the longest first; `start:KEY` is one that could not even be started."""
        found = [
            HungProbe(
                probe=worker.key if worker.born else f"start:{worker.key}", seconds=now - worker.asked_at
            )
            for worker in self._workers.values()
            if worker.hung
        ]
        return tuple(sorted(found, key=lambda probe: -probe.seconds))

    def counts(self) -> dict[str, int]:
        """How many children are idle, busy and hung. May be called from any thread."""
        found = {"idle": 0, "busy": 0, "hung": 0}
        for worker in list(self._workers.values()):
            found["hung" if worker.hung else "busy" if worker.request is not None else "idle"] += 1
        return found

    def problems(self) -> tuple[str, ...]:
        """Why something was not asked, or will not be: a sentence each; empty where every child can be had."""
        found = []
        groups = Counter(group_of(worker.key) for worker in self._workers.values() if worker.hung)
        for group, count in groups.items():
            if count >= MAX_HUNG_OF_GROUP:
                found.append(f"probes: {count} children of {group} hang: no more of them are started")
        found += [
            f"probes: {count} children of uid {uid} hang or do not answer: no more are started for this user"
            for uid, count in self.limited_users().items()
        ]
        if len(self._workers) >= self._max_workers and all(
            worker.request is not None for worker in self._workers.values()
        ):
            found.append(f"probes: all {len(self._workers)} children are busy or hang: nothing more is asked")
        if self._no_start:
            found.append(f"probes: {self._no_start}")
        if self.helper is not None and self.helper.problem:
            found.append(f"helper: {self.helper.problem}")
        return tuple(found)

    def limited_users(self) -> dict[int, int]:
        """Users who were refused a child in the last minute, with how many of theirs hang. May be called from any thread."""
        waiting = Counter(worker.uid for worker in list(self._workers.values()) if worker.hung)
        return {
            uid: waiting[uid]
            for uid, at in list(self._limited.items())
            if self._looked_at - at < LIMITED_S and waiting[uid]
        }

    def filenos(self) -> list[int]:
        """Descriptors that become readable when an answer comes, or a child or the spawner dies."""
        return [self._waiter.fileno()]

    def check(self) -> None:
        """Raises ProbesLost if the spawner is gone."""
        if self._lost or wait_readable([self._control.fileno()], 0):
            raise SpawnerDied("the process that starts the agent's children has ended")

    def rename(self, key: str, new_key: str) -> bool:
        """Sets the hung worker of `key` aside as `new_key`: still reported, given nothing to do, ended when it comes back.

        `key` gets a fresh worker with the next `ask`. False, with nothing changed, if the worker is not hung, if one that
        is busy or hung has that name already, or if too many hang: then `key` stays hung, and costs no further child.
        """
        worker = self._workers.get(key)
        if worker is None or not (worker.hung and worker.born) or not self.is_free(new_key):
            return False
        if not self._may_hang(new_key, key):
            return False
        self.retire(new_key)
        del self._workers[key]
        worker.key, worker.idle_s = new_key, 0.0
        self._workers[new_key] = worker
        return True

    def retire(self, key: str) -> None:
        """Ends the worker of `key` unless it has something to do: it sees the end of its socket and exits."""
        worker = self._workers.get(key)
        if worker is not None and worker.request is None:
            self._drop(worker)

    def names(self) -> list[str]:
        """Keys of all workers."""
        return list(self._workers)

    def leave(self) -> tuple[InheritedWorker, ...]:
        """Those that have something to do, for the agent that this process becomes by exec: to be called before `close`, which leaves
        their sockets alone then. The agent's own are killed with the spawner, and are gone but for those that can't be."""
        left = []
        for worker in [worker for worker in self._workers.values() if worker.request is not None]:
            told = left_of(worker)
            self._waiter.forget(told.fd)
            del self._by_fd[told.fd], self._workers[worker.key]
            worker.sock.detach()
            os.set_inheritable(told.fd, True)
            left.append(told)
        return tuple(left)

    def close(self) -> None:
        """Lets all children go; those in the kernel's uninterruptible sleep end when that does."""
        for worker in list(self._workers.values()):
            self._drop(worker)
        self._control.close()
        if self.helper is not None:
            self.helper.close()
        self._waiter.close()
        try:
            os.kill(self.spawner_pid, signal.SIGKILL)  # it only forks: nothing of it is lost
            os.waitpid(self.spawner_pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass

    # -- starting and ending -----------------------------------------------------------------------------------

    def _may_hang(self, key: str, instead_of: str = "") -> bool:
        """Whether a child under `key` could hang without there being too many that do."""
        hung = [worker.key for worker in self._workers.values() if worker.hung and worker.key != instead_of]
        group = group_of(key)
        return sum(group_of(each) == group for each in hung) < MAX_HUNG_OF_GROUP

    def _may_start(self, key: str, uid: int, now: float) -> bool:
        if not self._may_hang(key):
            return False
        if uid >= 0 and not self._may_have(uid):
            self._limited[uid] = now
            self._limited = {each: at for each, at in self._limited.items() if now - at < LIMITED_S}
            return False
        users = [worker for worker in self._workers.values() if worker.uid >= 0]
        kept_free = min(KEPT_FREE, self._max_workers // 4)
        if uid >= 0 and len(users) >= self._max_workers - kept_free:
            return self._make_room(users)
        if len(self._workers) < self._max_workers:
            return True
        return self._make_room(self._workers.values())

    def _may_have(self, uid: int) -> bool:
        """Whether this user may have one more child. Who has none may always: places run out for those who hang."""
        mine = [worker for worker in self._workers.values() if worker.uid == uid]
        if sum(worker.hung or not worker.proven for worker in mine) >= MAX_HUNG_OF_USER:
            return False
        return len(mine) < MAX_OF_USER or self._make_room(mine)

    def _make_room(self, among: Iterable[Worker]) -> bool:
        idle = [worker for worker in among if worker.request is None]
        if idle:
            self._drop(min(idle, key=lambda worker: worker.used_at))
        return bool(idle)

    def _start(self, key: str, uid: int, now: float, helped: bool) -> Worker | None:
        """A new worker, or None with `_no_start` saying why: out of descriptors, or the spawner is stopped."""
        if (
            helped and uid >= 0 and (refusal := refusal_as(uid)) is not None
        ):  # it would refuse, each time anew
            self._no_start = refusal
            return None
        if helped and not self._has_helper(now):
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self._no_start = f"no child can be started: {describe(error)}"
            return None
        with theirs:
            ours.setblocking(False)
            try:
                if helped and self.helper is not None:
                    self.helper.start(key, uid, theirs.fileno())
                else:
                    socket.send_fds(self._control, [encode([key, uid])], [theirs.fileno()])
            except OSError as error:
                ours.close()
                if helped:
                    if not isinstance(error, BlockingIOError):
                        self._lose_helper(describe(error))
                    self._no_start = f"the helper starts no child: {describe(error)}"
                    return None
                if isinstance(error, BrokenPipeError | ConnectionError):
                    raise SpawnerDied(f"no child can be started: {error}") from error
                self._no_start = f"no child can be started: {describe(error)}"
                return None
        worker = self._workers[key] = Worker(key, uid, ours, now, idle_s_of(key), helped=helped)
        self._by_fd[ours.fileno()] = worker
        self._waiter.watch(ours.fileno())
        return worker

    def _has_helper(self, now: float) -> bool:
        assert self.helper is not None
        if self.helper.sock is None:
            sock = self.helper.connect(now)
            if sock is not None:
                self._waiter.watch(sock.fileno())
        return self.helper.sock is not None

    def _lose_helper(self, why: str) -> None:
        """Its children have died with it: each tells by the end of its own socket, but for those that hang."""
        if self.helper is not None and self.helper.sock is not None:
            self._waiter.forget(self.helper.sock.fileno())
            self.helper.lose(why)

    def _drop(self, worker: Worker) -> None:
        fd = worker.sock.fileno()
        self._waiter.forget(fd)
        del self._by_fd[fd], self._workers[worker.key]
        worker.sock.close()

    # -- talking -----------------------------------------------------------------------------------------------

    def _flush(self, worker: Worker) -> None:
        while worker.outbox:
            try:
                del worker.outbox[: worker.sock.send(worker.outbox)]
            except BlockingIOError:
                break
            except OSError:
                worker.outbox.clear()  # its end is seen when reading
        if worker.writing != bool(worker.outbox):
            worker.writing = bool(worker.outbox)
            self._waiter.watch(worker.sock.fileno(), writing=worker.writing)

    def _receive(self, worker: Worker, now: float, done: set[int]) -> None:
        ended = not read_into(worker, self._buffer)
        try:
            replies = unframe(worker.inbox)
        except ValueError as error:
            log.error("%s said something that is no answer (%s): its worker is dropped", worker.key, error)
            replies, ended = [], True
        for reply in replies:
            if not self._take(worker, reply, now, done):
                ended = True
                break
        if ended and self._workers.get(worker.key) is worker:
            was_busy = worker.request is not None and not worker.hung
            self._drop(worker)
            if was_busy:
                finish(worker, None, "the child ended", now, done)

    def _take(self, worker: Worker, reply: Any, now: float, done: set[int]) -> bool:
        """Hands over one reply; False if it is none."""
        if not isinstance(reply, list) or len(reply) not in (2, 3) or not isinstance(reply[0], int):
            log.error("%s said something that is no answer: its worker is dropped", worker.key)
            return False
        if reply[0] == 0 and len(reply) == 2:
            worker.born = True
            if isinstance(reply[1], int):
                worker.pid, worker.start_ticks = reply[1], start_of(reply[1])
            return True
        if worker.request is None or reply[0] not in (0, worker.request):
            return True
        if len(reply) == 2:
            if not worker.hung and worker.on_part is not None:
                hand_over(worker.key, worker.on_part, reply[1])
            return True
        if reply[0] == 0:
            self._no_start = str(reply[2])
            self._drop(worker)  # nobody is behind this socket
        elif not worker.proven:
            worker.proven, self._no_start = True, ""
        if worker.hung:
            log.warning("%s answered after %.0f s: it is free again", worker.key, now - worker.asked_at)
            worker.request, worker.hung, worker.used_at = None, False, now
        else:
            finish(worker, reply[1], reply[2], now, done)
        return True

    def _judge(self, worker: Worker, now: float, done: set[int]) -> None:
        """Calls a worker hung that is beyond its deadline, unless it was we who were away."""
        if now - max(self._looked_at, worker.asked_at) > worker.deadline - worker.asked_at + PAUSE_S:
            worker.deadline = now + GRACE_S
            return
        why = self._why_no_answer(worker, now)
        if why is not None:
            log.warning("%s: %s", worker.key, why)
            self._end(worker)
            finish(worker, None, why, now, done)
            return
        request, then, waited = worker.request, worker.then, now - worker.asked_at
        assert request is not None
        worker.hung, worker.then, worker.on_part = True, None, None
        done.add(request)
        if worker.born:
            log.warning("%s has not answered for %.1f s: no new requests until it does", worker.key, waited)
            answer = Answer(request, worker.key, None, f"no answer within {waited:.0f} s", True, waited)
        else:  # who starts children is at fault, or the directory of users: nothing is known of what it was to look at
            log.warning("%s was not started within %.1f s: no new requests until it is", worker.key, waited)
            answer = Answer(request, worker.key, None, f"its child was not started within {waited:.0f} s")
        hand_over(worker.key, then, answer)

    # -- what a child does that does not answer ----------------------------------------------------------------

    def _look_at(self, worker: Worker, now: float) -> None:
        """One look at a child that has been at work for a while; what only the helper may see of it is asked for."""
        if not worker.born or worker.pid <= 0 or now - max(worker.looked_at, worker.asked_at) < APART_S:
            return
        worker.looked_at = now
        look = look_at(worker.pid, worker.start_ticks, now)
        if look.call or look.state not in ("D", "S") or self.helper is None or worker.key == LOOK_AT_CHILDREN:
            note_look(worker, look)
        else:  # in a call that only the helper may see: a look without it would count as another call
            asked = [("call", worker.pid, worker.pid)]
            then = partial(self._take_call, worker, worker.request, look)
            self.ask(LOOK_AT_CHILDREN, "look_at_calls", asked, LOOK_S, now, then)

    def _take_call(self, worker: Worker, request: int | None, look: Look, answer: Answer) -> None:
        found = (answer.value or [None])[0]
        if found is not None and worker.request == request:
            note_look(worker, replace(look, call=str(found[0])))

    def _why_no_answer(self, worker: Worker, now: float) -> str | None:
        """Why a child that has passed its deadline says nothing about its resource; None where it may hang on it."""
        if not worker.born or worker.pid <= 0:
            return None
        why = why_no_answer(look_at(worker.pid, worker.start_ticks, now))
        seen_waiting = worker.last_look is not None and not worker.running
        return None if why == STARVED and seen_waiting else why

    def _give_up_idle(self, worker: Worker, now: float) -> None:
        """A hung child that was stopped meanwhile, or computes again, is ended: the next question goes to a fresh one."""
        look = worker.last_look
        if worker.born and look is not None and look.at == now and (why := why_no_answer(look)) is not None:
            if why == STARVED and (now - worker.deadline < PAUSE_S or worker.running < STARVED_LOOKS):
                return  # it may be about to answer, or polls in a call that does not return
            log.warning("%s: %s", worker.key, why)
            self._end(worker)

    def _end(self, worker: Worker) -> None:
        """Kills the child and lets go of it. One that can't be killed is left, and finds its socket closed."""
        try:
            if worker.helped and self.helper is not None:
                self.helper.end(worker.pid)
            elif not worker.helped and start_of(worker.pid) == worker.start_ticks:
                os.kill(worker.pid, signal.SIGKILL)
        except OSError as error:
            log.warning("%s: its child can't be ended: %s", worker.key, describe(error))
        if self._workers.get(worker.key) is worker:
            self._drop(worker)
