"""Disposable children: everything that could hang is done in one of them, with a deadline.

A small process, the spawner, is forked before the agent has any thread. On request it forks workers that share
its memory; each worker serves one resource, named by its key (`identify`, `stacks`, `files:/shared:1000`). A
worker that misses its deadline is reported as hung, gets no new requests and is not replaced until it answers;
that answer is dropped, and the worker is free again. The agent's loop never waits for any of them.

Where one worker serves many things of which one hangs (processes to identify), it sends the answer in parts, so
that the first missing part tells which one it was; `rename` then sets it aside under that one's name, and the
others get a fresh worker.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Iterable
from typing import Any

from slurm_watchdog.agent.workers.admission import MAX_WORKERS, Admission
from slurm_watchdog.agent.workers.child import Functions, frame, unframe
from slurm_watchdog.agent.workers.request_types import ReadThreads, Request
from slurm_watchdog.agent.workers.spawner import HelperLink, Spawner, SpawnerDied, Starter
from slurm_watchdog.agent.workers.worker import (
    APART_S,
    LOOK_AT_CHILDREN,
    READ_SIZE,
    Answer,
    CallThen,
    HungWorker,
    OnPart,
    Value,
    Worker,
    call_back,
    decode_answer,
    deliver_part,
    finish,
    idle_s_of,
    is_over,
    is_stuck,
    read_into,
    recall,
    start_of,
    watch_at_work,
    why_given_up,
    why_silent,
)
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import Waiter, wait_readable
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.observations import HungProbe

log = logging.getLogger(__name__)

PAUSE_S = 5.0  # Beyond a request's deadline: an agent that has not looked for so long was stopped itself.
GRACE_S = 1.0
LOOK_S = 5.0  # Deadline of one look at a child of the helper.


class WorkerPool:
    """The pool of workers. `now` is the monotonic clock of the caller."""

    def __init__(
        self,
        functions: Functions,
        max_workers: int = MAX_WORKERS,
        read_clock: Callable[[], float] = clock.monotonic,
        helper: HelperLink | None = None,
        helped: Collection[str] = (),
        former: Iterable[HungWorker] = (),
    ):
        """Forks the spawner: to be made before any thread. `functions` are what workers can do, by name. Those in
        `helped` are done by children of the `helper`, if there is one: the same workers, with its rights. `former`
        are children of the agent before this one that had not answered: none is replaced until it has ended."""
        self.helper = helper
        self._helped = frozenset(helped) if helper is not None else frozenset[str]()
        self.read_clock = read_clock
        self._workers: dict[str, Worker] = {}
        self._by_fd: dict[int, Worker] = {}
        self._next_request = 1
        self._lost = False
        self._buffer = memoryview(bytearray(READ_SIZE))
        self._looked_at = float("-inf")
        self._spawner = Spawner(functions)
        self.spawner_pid = self._spawner.pid
        self._admission = Admission(self._workers, max_workers, self._drop)
        self._waiter = Waiter()
        self._waiter.watch(self._spawner.fileno())
        self._starter = Starter(self._spawner, helper, self._waiter)
        for each in former:
            worker = recall(each, self._next_request, read_clock())
            self._workers[worker.key] = self._by_fd[worker.sock.fileno()] = worker
            self._next_request += 1

    def ask(
        self, key: str, request: Request[Value], deadline_s: float, now: float,
        then: Callable[[Answer[Value]], None], uid: int = -1, *, on_part: OnPart | None = None,
        idle_s: float | None = None,
    ) -> int | None:  # fmt: skip
        """Gives `key`'s worker a request; returns its number, or None if the worker is busy, hung or unavailable.

        The worker is started if there is none; with `uid` it becomes that user first. `then` is called once,
        by `poll` or `settle`: with the answer, or when the deadline has passed. Before that `on_part` is called
        with each part that the worker sends ahead; those that come after the deadline are dropped, as the
        answer is. The worker ends when it has been idle for `idle_s` (0: as soon as it has answered; None: what
        suits its kind). Raises SpawnerDied if no worker can be started ever again.
        """
        worker = self._workers.get(key)
        if worker is not None and worker.request is not None:
            return None
        if worker is not None and worker.uid != uid:
            self.retire(key)
            worker = None
        if worker is None:
            if not self._admission.may_start(key, uid, now):
                return None
            worker = self._start(key, uid, now, request.task in self._helped)
        if worker is None:
            return None
        number, self._next_request = self._next_request, self._next_request + 1
        worker.request, worker.request_type = number, type(request)
        worker.asked_at, worker.deadline = now, now + deadline_s
        worker.used_at, worker.then, worker.on_part = now, then, on_part
        worker.first_look = worker.last_look = None
        worker.running = 0
        if idle_s is not None:
            worker.idle_s = idle_s
        worker.outbox += frame([number, request.task, request])
        self._flush(worker)
        return number

    def poll(self, now: float) -> set[int]:
        """Delivers all answers that are there, and one with `timed_out` for each deadline that has just passed. Returns
        the numbers of the requests that are thereby done. What a `then` raises is logged, and no more."""
        done: set[int] = set()
        for fd in self._waiter.wait(0.0):
            worker = self._by_fd.get(fd)
            if worker is not None:
                self._flush(worker)
                self._receive(worker, now, done)
            self._lost |= fd == self._spawner.fileno()
            if self.helper is not None and self.helper.sock is not None and fd == self.helper.sock.fileno():
                self._starter.disconnect_helper("it has ended the connection")  # it says nothing else
        for worker in list(self._workers.values()):
            if is_over(worker):
                log.warning("%s: the child of the agent before has ended: it is free again", worker.key)
                self._drop(worker)
            elif worker.request is not None:
                watch_at_work(worker, now, None if self.helper is None else self._ask_for_call)
                if now >= worker.deadline and not worker.hung:
                    self._miss_deadline(worker, now, done)
                elif worker.hung and (why := why_given_up(worker, now)) is not None:
                    log.warning("%s: %s", worker.key, why)
                    self._end(worker)
            elif now - worker.used_at >= worker.idle_s:
                self._drop(worker)
        self._looked_at = now
        return done

    def settle(self, seconds: float, requests: Iterable[int]) -> None:
        """Waits at most `seconds` for the answers of `requests`, delivering all that come. Ask all that is to be asked
        first, and settle once for all: the children then work at the same time."""
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
        """For how many seconds the hung worker of `key` has been waiting; None if it is not hung, or never started."""
        worker = self._workers.get(key)
        return now - worker.asked_at if worker is not None and worker.hung and worker.born else None

    def is_stuck(self, key: str) -> bool:
        """Whether the worker of `key` was seen to hang in a call: only then it says anything about its resource."""
        worker = self._workers.get(key)
        return worker is not None and worker.born and is_stuck(worker)

    def hung(self, now: float) -> tuple[HungProbe, ...]:
        """Every hung child, the longest first; `start:KEY` is one that could not even be started."""
        found = [
            HungProbe(probe=worker.key if worker.born else f"start:{worker.key}", seconds=now - worker.asked_at)
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
        """Why something was not asked, or will not be: a sentence each."""
        found = list(self._admission.problems(self._looked_at))
        if self._starter.problem:
            found.append(f"probes: {self._starter.problem}")
        if self.helper is not None and self.helper.problem:
            found.append(f"helper: {self.helper.problem}")
        return tuple(found)

    def filenos(self) -> list[int]:
        """Descriptors that become readable when an answer comes, or a child or the spawner dies."""
        return [self._waiter.fileno()]

    def check(self) -> None:
        """Raises ProbesLost if the spawner is gone."""
        if self._lost or wait_readable([self._spawner.fileno()], 0):
            raise SpawnerDied("the process that starts the agent's children has ended")

    def rename(self, key: str, new_key: str) -> bool:
        """Sets the hung worker of `key` aside as `new_key`: still reported, idle, ended when it answers. `key` gets a
        fresh worker with the next `ask`. False, with nothing changed, if the worker is not hung, if one that is busy or
        hung has that name already, or if too many hang: then `key` stays hung, and costs no further child."""
        worker = self._workers.get(key)
        if worker is None or not (worker.hung and worker.born) or not self.is_free(new_key):
            return False
        if not self._admission.may_hang(new_key, key):
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

    def unanswered(self, now: float) -> tuple[HungWorker, ...]:
        """Those that hang, or have been at work for a while, for the next agent: after `close` they end as soon as
        they return."""
        return tuple(
            picked(HungWorker, worker)
            for worker in self._workers.values()
            if worker.request is not None and worker.born and (worker.hung or now - worker.asked_at >= APART_S)
        )

    def close(self) -> None:
        """Lets all children go; those in the kernel's uninterruptible sleep end when that does."""
        for worker in list(self._workers.values()):
            self._drop(worker)
        if self.helper is not None:
            self.helper.close()
        self._waiter.close()
        self._spawner.close()

    def _start(self, key: str, uid: int, now: float, helped: bool) -> Worker | None:
        sock = self._starter.start(key, uid, now, helped)
        if sock is None:
            return None
        worker = self._workers[key] = Worker(key, uid, sock, now, idle_s_of(key), helped=helped)
        self._by_fd[sock.fileno()] = worker
        self._waiter.watch(sock.fileno())
        return worker

    def _drop(self, worker: Worker) -> None:
        fd = worker.sock.fileno()
        self._waiter.forget(fd)
        del self._by_fd[fd], self._workers[worker.key]
        worker.sock.close()

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
            log.error("%s sent an invalid answer (%s): its worker is dropped", worker.key, error)
            replies, ended = [], True
        for reply in replies:
            if not self._apply_reply(worker, reply, now, done):
                ended = True
                break
        if ended and self._workers.get(worker.key) is worker:
            was_busy = worker.request is not None and not worker.hung
            self._drop(worker)
            if was_busy:
                finish(worker, None, "the child ended", now, done)

    def _apply_reply(self, worker: Worker, reply: Any, now: float, done: set[int]) -> bool:
        """Hands over one reply; False if it is none."""
        if not isinstance(reply, list) or len(reply) not in (2, 3) or not isinstance(reply[0], int):
            log.error("%s sent an invalid answer: its worker is dropped", worker.key)
            return False
        if reply[0] == 0 and len(reply) == 2:
            worker.born = True
            if isinstance(reply[1], int):
                worker.pid, worker.start_ticks = reply[1], start_of(reply[1])
        elif worker.request is None or reply[0] not in (0, worker.request):
            pass  # of a request that is over
        elif len(reply) == 2:
            deliver_part(worker, reply[1])
        else:
            self._apply_answer(worker, reply, now, done)
        return True

    def _apply_answer(self, worker: Worker, reply: list[Any], now: float, done: set[int]) -> None:
        if reply[0] == 0:
            self._starter.problem = str(reply[2])
            self._drop(worker)  # no one is behind this socket
        elif not worker.proven:
            worker.proven, self._starter.problem = True, ""
        if worker.hung:
            log.warning("%s answered after %.0f s: it is free again", worker.key, now - worker.asked_at)
            worker.request, worker.hung, worker.used_at = None, False, now
        else:
            finish(worker, *decode_answer(worker, reply[1], reply[2]), now, done)

    def _miss_deadline(self, worker: Worker, now: float, done: set[int]) -> None:
        """Marks a worker beyond its deadline as hung, unless this process itself was stopped."""
        if now - max(self._looked_at, worker.asked_at) > worker.deadline - worker.asked_at + PAUSE_S:
            worker.deadline = now + GRACE_S
            return
        why = why_silent(worker, now)
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
            answer = Answer[Any](request, worker.key, None, f"no answer within {waited:.0f} s", True, waited)
        else:  # who starts children is at fault, or the directory of users: nothing is known of what it was to look at
            log.warning("%s was not started within %.1f s: no new requests until it is", worker.key, waited)
            answer = Answer(request, worker.key, None, f"its child was not started within {waited:.0f} s")
        call_back(worker.key, then, answer)

    def _ask_for_call(self, pid: int, then: CallThen, now: float) -> None:
        self.ask(LOOK_AT_CHILDREN, ReadThreads([("call", pid, pid)]), LOOK_S, now, then)

    def _end(self, worker: Worker) -> None:
        """Kills the child and closes its socket; one that cannot be killed finds that when it continues."""
        try:
            if worker.helped and self.helper is not None:
                self.helper.end(worker.pid)
            elif not worker.helped and start_of(worker.pid) == worker.start_ticks:
                os.kill(worker.pid, signal.SIGKILL)
        except OSError as error:
            log.warning("%s: its child cannot be ended: %s", worker.key, describe(error))
        if self._workers.get(worker.key) is worker:
            self._drop(worker)
