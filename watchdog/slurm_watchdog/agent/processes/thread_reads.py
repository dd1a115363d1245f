"""What threads of jobs do, from the children of their users: all is requested at once, and the loop waits a moment for
the answers. What does not come is not the same as a thread that has ended: nothing may be concluded from it, neither
that a thread is blocked nor that it no longer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from slurm_watchdog.agent.children.answers import SeenThreads, ThreadFacts
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ReadThreads, ThreadFile
from slurm_watchdog.agent.proc.system_call import SeenCall
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.base import clock

TICK_S = 0.3  # Of one tick the loop waits no longer than this for all answers together.
DEADLINE_S = 5.0
AT_ONCE = 2048  # Of one user.


class ThreadReads:
    """What was read in this tick."""

    def __init__(self, looks: UserLooks, read_clock: Callable[[], float] = clock.monotonic):
        self._looks, self._read_clock = looks, read_clock
        self._known: dict[ThreadFile, ThreadFacts | None] = {}
        self._left_s = TICK_S
        self.unseen: set[int] = set()  # Users of whom something in this tick was not answered, or not to be asked.

    def begin(self) -> None:
        """A new tick: what was read in the last one is old."""
        self._known.clear()
        self._left_s, self.unseen = TICK_S, set()

    def fetch(self, items: Iterable[ThreadFile]) -> None:
        """Gets all of these that are not known yet, in one request for each user. Each user's child is asked whatever
        others do; a silent one takes from the time that is waited, and from nothing else."""
        by_user: dict[int, list[ThreadFile]] = {}
        for item in dict.fromkeys(items):
            uid = self._looks.uid_of(item[1])
            if item in self._known:
                continue
            if uid < 0 or self._looks.refusal(uid) is not None:  # it has ended, or is root's
                self._known[item] = None
            elif self._looks.may_ask(item[1]):
                by_user.setdefault(uid, []).append(item)
            else:
                self.unseen.add(uid)
        began, requests = self._read_clock(), list[int | None]()
        for uid, wanted in by_user.items():
            del wanted[AT_ONCE:]
            pids = [pid for _, pid, _ in wanted]
            then = partial(self._remember, wanted)
            requests.append(self._looks.ask(uid, ReadThreads(wanted), pids, DEADLINE_S, began, then))
        if numbers := [each for each in requests if each is not None]:
            self._looks.children.settle(max(0.0, self._left_s), numbers)
            self._left_s -= self._read_clock() - began
        self.unseen |= {uid for uid, wanted in by_user.items() if wanted[0] not in self._known}

    @property
    def calls(self) -> dict[tuple[int, int], SeenCall | None]:
        """Of each (pid, thread) that was looked at, its call, None where it is in none that matters."""
        known = self._known.items()
        return {item[1:]: None if found is None else found.call for item, found in known if item[0] == "call"}

    def counters_of(self, pid: int) -> ThreadFacts | None:
        """CPU time, and bytes where those were asked for, if they are known."""
        return self._known.get(("io", pid, pid)) or self._known.get(("cpu", pid, pid))

    def devices_of(self, threads: Sequence[tuple[int, int]]) -> list[tuple[str, ...] | None]:
        """The devices that each of these (pid, thread) has open; None where that can't be seen."""
        items: list[ThreadFile] = [("devices", pid, thread) for pid, thread in threads]
        self.fetch(items)
        return [found.devices if (found := self._known.get(item)) is not None else None for item in items]

    def _remember(self, wanted: list[ThreadFile], answer: Answer[SeenThreads]) -> None:
        if (seen := answer.value) is not None:
            self._known |= dict.fromkeys(wanted[: seen.looked])
            self._known |= {wanted[at]: facts for at, facts in seen.found if 0 <= at < seen.looked <= len(wanted)}
