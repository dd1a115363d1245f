"""Which logs ranks have open: asked of a worker, of a new process at once and soon again, of an old one
seldom and in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ListOpenLogs
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.model.observations import Event, LogFile, Process, Role


class FollowedJob(msgspec.Struct):
    uid: int
    seen_at: float
    opened: list[str] = []
    found: dict[str, list[str]] = {}  # What stands for each pattern with wildcards.
    left_out: list[str] = []  # Logs that are not followed, for there are too many.
    seats: dict[int, WorkerRank] = {}  # Pid, as the job sees it -> rank, as a log of this run said last.
    said: tuple[tuple[int, int, int, int], ...] = ()  # The rows of that, also where an earlier run wrote them.
    restarts: int | None = None


class LogMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of logs, for the one that it becomes: how far each was read, and the recent past."""

    jobs: dict[str, FollowedJob] = {}
    rows: tuple[tuple[LogFile, float], ...] = ()
    recent: tuple[tuple[float, Event], ...] = ()  # In the order in which they were read.


LIST_FIRST_S, LIST_EVERY_S = 10.0, 300.0
"""Between two lists of a process's open files: it doubles. A trainer opens its log in its first minutes, if
not at once; a list of 160 descriptors costs a millisecond."""
LISTED_IN_TURN = 3  # Old processes in one tick: 180 in LIST_EVERY_S.
RANKS_BEFORE_S = 3600.0  # Where more are due, a rank comes before others that have been due for less than this.
MAX_LISTED = 128  # Processes whose open files are listed at once.


@dataclass
class OpenLogs:
    """Whose open files are listed when."""

    looks: UserLooks
    found: Callable[[str, list[str]], None]  # Given a job, and the files that its processes have open.
    _next: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(pid, start) of who was listed -> when it is to be listed again, and how long that is after the last time."""
    _listing: set[int] = field(default_factory=set)  # Users whose child is at it.

    def ask(self, processes: Iterable[Process], now: float, deadline_s: float) -> list[int]:
        """Asks whose open files are due; returns the numbers of the requests."""
        living = {(p.pid, p.start_ticks): p for p in processes if p.state not in ("Z", "X")}
        self._next = {key: due for key, due in self._next.items() if key in living}
        new = sorted(living.keys() - self._next.keys(), key=lambda key: (living[key].role is not Role.RANK, key))
        due = [key for key, (due, _) in self._next.items() if now >= due]
        due.sort(key=lambda key: (self._next[key][0] + RANKS_BEFORE_S * (living[key].role is not Role.RANK), key))
        mine: dict[int, list[Process]] = {}
        for process in (living[key] for key in [*new[:MAX_LISTED], *due[:LISTED_IN_TURN]]):
            if self.looks.may_ask(process.pid) and self.looks.refusal(process.uid) is None:
                mine.setdefault(process.uid, []).append(process)
        asked = [self._ask(uid, each, now, deadline_s) for uid, each in mine.items() if uid not in self._listing]
        return [number for number in asked if number is not None]

    def _ask(self, uid: int, mine: list[Process], now: float, deadline_s: float) -> int | None:
        question = ListOpenLogs([(each.job_id, each.pid, each.role is not Role.WORKER) for each in mine])
        pids = [each.pid for each in mine]
        number = self.looks.ask(uid, question, pids, deadline_s, now, partial(self.apply, uid))
        if number is None:
            return None
        self._listing.add(uid)
        for key in ((each.pid, each.start_ticks) for each in mine):
            wait_s = min(2 * self._next[key][1], LIST_EVERY_S) if key in self._next else LIST_FIRST_S
            self._next[key] = (now + wait_s, wait_s)
        return number

    def apply(self, uid: int, answer: Answer[dict[str, list[str]]]) -> None:
        """Reports the files that a child has found."""
        self._listing.discard(uid)
        for job_id, paths in (answer.value or {}).items():
            self.found(job_id, paths)
