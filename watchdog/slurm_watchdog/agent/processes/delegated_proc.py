"""Files of /proc for an agent that may not read all of them: those of other users' threads come from the child `look`.

Many are requested at once, a few times in a tick, and the loop waits a moment for the answer. What does not
come is NotSeenError, which is not the same as a thread that has ended: nothing may be concluded from it, neither
that a thread is blocked nor that it no longer is.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from slurm_watchdog.agent.proc.blocked_calls import NotSeenError
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.agent.workers.answer_types import OpenDevices, ThreadCall, ThreadFacts
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import ReadThreads, ThreadFile
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.base import clock

LOOK = "look"
TICK_S = 0.3  # Of one tick the loop waits no longer than this for all answers of `look` together.
DEADLINE_S = 5.0
AT_ONCE = 2048
_PATH = re.compile(r"/proc/(\d+)(?:/task/(\d+))?/(io|syscall|wchan)")


class DelegatedFiles:
    """Reads through workers what this process may not read by itself."""

    def __init__(self, probes: WorkerPool, read_clock: Callable[[], float] = clock.monotonic):
        self._probes, self._read_clock = probes, read_clock
        self._known: dict[ThreadFile, ThreadFacts | None] = {}
        self._left_s = TICK_S
        self.unseen = False  # Whether something that was asked in this tick was not answered.

    def begin(self) -> None:
        """A new tick: what was read in the last one is old."""
        self._known.clear()
        self._left_s, self.unseen = TICK_S, False

    def fetch(self, items: Iterable[ThreadFile]) -> None:
        """Gets all of these that are not known yet, in one request."""
        wanted = [item for item in dict.fromkeys(items) if item not in self._known][:AT_ONCE]
        if not wanted or self._left_s <= 0:
            self.unseen |= bool(wanted)
            return
        began = self._read_clock()
        then = partial(self._remember, wanted)
        request = self._probes.ask(LOOK, ReadThreads(wanted), DEADLINE_S, began, then)
        if request is not None:
            self._probes.settle(self._left_s, [request])
            self._left_s -= self._read_clock() - began
        self.unseen |= wanted[0] not in self._known

    def read(self, path: str) -> bytes:
        """Raises NotSeenError where no process could look, OSError where there is nothing (any more)."""
        match = _PATH.fullmatch(path)
        if match is None:
            return read_file(path)
        pid, thread, name = int(match[1]), match[2], match[3]
        if thread is None:
            return (self._get(("io", pid, pid)).io or "").encode("latin-1")
        call = self._call(pid, int(thread))
        return {"syscall": call.line, "wchan": call.wchan, "io": call.io}[name].encode("latin-1")

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

    def devices_of(self, pid: int, thread: int) -> tuple[int, list[str]]:
        """How many files a process has open, and which of them are devices."""
        found = self._get(("devices", pid, thread)).devices or OpenDevices(0, ())
        return found.open_files, list(found.devices)

    def _call(self, pid: int, thread: int) -> ThreadCall:
        return self._get(("call", pid, thread)).call or ThreadCall("")

    def _get(self, item: ThreadFile) -> ThreadFacts:
        if item not in self._known:
            self.fetch([item])
        if item not in self._known:
            raise NotSeenError(errno.EAGAIN, "no process could look")
        facts = self._known[item]
        if facts is None:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        return facts

    def _remember(self, wanted: list[ThreadFile], answer: Answer[list[ThreadFacts | None]]) -> None:
        self._known.update(zip(wanted, answer.value or (), strict=False))
