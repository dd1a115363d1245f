"""What threads of jobs do, from the children of their users: many are requested at once, a few times in a tick, and the
loop waits a moment for the answers. What does not come is NotSeenError, which is not the same as a thread that has
ended: nothing may be concluded from it, neither that a thread is blocked nor that it no longer is.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from slurm_watchdog.agent.children.answers import OpenDevices, ThreadCall, ThreadFacts
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ReadThreads, ThreadFile
from slurm_watchdog.agent.proc.blocked_calls import NotSeenError
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.base import clock

TICK_S = 0.3  # Of one tick the loop waits no longer than this for all answers together.
DEADLINE_S = 5.0
AT_ONCE = 2048  # Of one user.
_PATH = re.compile(r"/proc/(\d+)/task/(\d+)/(io|syscall|wchan|stat|status)")


class ThreadReads:
    """What was read in this tick."""

    def __init__(self, looks: UserLooks, read_clock: Callable[[], float] = clock.monotonic):
        self._looks, self._read_clock = looks, read_clock
        self._known: dict[ThreadFile, ThreadFacts | None] = {}
        self._left_s = TICK_S
        self.unseen: set[int] = set()  # Users of whom something that was asked in this tick was not answered.

    def begin(self) -> None:
        """A new tick: what was read in the last one is old."""
        self._known.clear()
        self._left_s, self.unseen = TICK_S, set()

    def fetch(self, items: Iterable[ThreadFile]) -> None:
        """Gets all of these that are not known yet, in one request for each user."""
        by_user: dict[int, list[ThreadFile]] = {}
        for item in dict.fromkeys(items):
            uid = self._looks.uid_of(item[1])
            if item in self._known:
                continue
            if uid < 0 or self._looks.refusal(uid) is not None:  # it has ended, or is root's
                self._known[item] = None
            elif self._looks.may_ask(item[1]):
                by_user.setdefault(uid, []).append(item)
        began, requests = self._read_clock(), list[int | None]()
        for uid, wanted in by_user.items():
            wanted = wanted[:AT_ONCE]
            pids = [pid for _, pid, _ in wanted]
            then = partial(self._remember, wanted)
            if self._left_s > 0:
                requests.append(self._looks.ask(uid, ReadThreads(wanted), pids, DEADLINE_S, began, then))
        if numbers := [each for each in requests if each is not None]:
            self._looks.children.settle(self._left_s, numbers)
            self._left_s -= self._read_clock() - began
        self.unseen |= {uid for uid, wanted in by_user.items() if wanted[0] not in self._known}

    def read(self, path: str) -> bytes:
        """A file of a thread. Raises NotSeenError where no process could look, OSError where there is nothing (any
        more)."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise ValueError(f"{path} is not read by a child")
        call = self._call(int(match[1]), int(match[2]))
        text: str = call.line if match[3] == "syscall" else getattr(call, match[3])
        return text.encode("latin-1")

    def read_calls(self, pid: int, threads: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The line of `syscall` of each of these threads that lives, as far as it could be seen."""
        items: list[ThreadFile] = [("call", pid, thread) for thread in threads]
        self.fetch(items)
        for item in items:
            facts = self._known.get(item)
            if facts is not None and facts.call is not None:
                yield item[2], facts.call.line.encode("latin-1")

    def file_of(self, pid: int, thread: int, number: int) -> str | None:
        """The open file that the call of this thread is about."""
        return self._call(pid, thread).file

    def counters_of(self, pid: int) -> ThreadFacts | None:
        """CPU time, and bytes where those were asked for, if they are known."""
        return self._known.get(("io", pid, pid)) or self._known.get(("cpu", pid, pid))

    def devices_of(self, threads: Sequence[tuple[int, int]]) -> list[OpenDevices | None]:
        """How many files each of these (pid, thread) has open, and which of them are devices; None where that can't be
        seen."""
        items: list[ThreadFile] = [("devices", pid, thread) for pid, thread in threads]
        self.fetch(items)
        return [found.devices if (found := self._known.get(item)) is not None else None for item in items]

    def _call(self, pid: int, thread: int) -> ThreadCall:
        item: ThreadFile = ("call", pid, thread)
        if item not in self._known:
            self.fetch([item])
        if item not in self._known:
            raise NotSeenError(errno.EAGAIN, "no process could look")
        facts = self._known[item]
        if facts is None or facts.call is None:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        return facts.call

    def _remember(self, wanted: list[ThreadFile], answer: Answer[list[ThreadFacts | None]]) -> None:
        self._known.update(zip(wanted, answer.value or (), strict=False))
