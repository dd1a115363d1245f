"""Which logs ranks have open: asked of a worker, of a new process at once and soon again, of an old one
seldom and in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from slurm_watchdog.agent.proc.files import count_open_files
from slurm_watchdog.agent.processes.identity_cache import IDENTIFY
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import Follow, ListOpenLogs
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.model.observations import Event, LogFile, Process, Role


class FollowedJob(msgspec.Struct):
    uid: int
    seen_at: float
    opened: list[str] = []
    found: dict[str, list[str]] = {}  # What stands for each pattern with wildcards.
    left_out: list[str] = []  # Logs that are not followed, for there are too many.
    seats: dict[int, WorkerRank] = {}
    """Pid, as the job sees it -> rank, as a log of this run said last."""
    said: tuple[tuple[int, int, int, int], ...] = ()  # The rows of that, also where an earlier run wrote them.
    restarts: int | None = None


class LogMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of logs, for the one that it becomes: how far each was read, and the recent past."""

    jobs: dict[str, FollowedJob] = {}
    rows: tuple[tuple[LogFile, float], ...] = ()
    recent: tuple[tuple[float, Event], ...] = ()  # In the order in which they were read.


class Plan(msgspec.Struct):
    """What one child is asked in one look."""

    files: list[tuple[str, str, int | None]] = []
    globs: list[tuple[str, str]] = []
    own: dict[str, list[str]] = {}  # Of each job, the site's patterns of progress.

    def request(self, taken: str | None) -> Follow:
        return Follow(self.files, self.globs, self.own, taken)


LIST_FIRST_S, LIST_EVERY_S = 10.0, 300.0
"""Between two lists of a process's open files: it doubles. A trainer opens its log in its first minutes, if
not at once; a list of 160 descriptors costs a millisecond."""
LISTED_IN_TURN = 2
"""Old processes in one tick. One that has as many files open as when it was listed last is left out, but for
LIST_EVERY_S at most:
in place of a file that it closed it may have opened another."""
MAX_LISTED = 128  # Processes whose open files are listed at once.


@dataclass(frozen=True, slots=True)
class _Listed:
    """When the open files of a process were listed last, and are to be again."""

    at: float
    count: int  # Of its open files then; 0 where the kernel does not say.
    due: float
    wait_s: float


@dataclass
class OpenLogs:
    """Whose open files were listed when."""

    probes: WorkerPool
    found: Callable[[str, list[str]], None]  # Given a job, and the files that its processes have open.
    count_open: Callable[[int], int] = count_open_files
    _listed: dict[tuple[int, int], _Listed] = field(default_factory=dict)  # By (pid, start).
    _listing: bool = False

    def ask(self, processes: Iterable[Process], now: float, deadline_s: float) -> list[int]:
        """Asks whose open files are due; returns the numbers of the requests."""
        living = {(p.pid, p.start_ticks): p for p in processes if p.state not in ("Z", "X")}
        self._listed = {key: listed for key, listed in self._listed.items() if key in living}
        if self._listing:
            return []
        ordered = sorted(living, key=lambda key: (living[key].role is not Role.RANK, key))
        new = [key for key in ordered if key not in self._listed][:MAX_LISTED]
        again = [key for key in ordered if key in self._listed and self._is_due(key, now)]
        keys = [*new, *again[:LISTED_IN_TURN]]
        if not keys:
            return []
        question = ListOpenLogs(
            [(living[key].job_id, living[key].pid, living[key].role is not Role.WORKER) for key in keys]
        )
        request = self.probes.ask(IDENTIFY, question, deadline_s, now, self.apply)
        if request is None:
            return []
        self._listing = True
        for key in keys:
            wait_s = min(2 * self._listed[key].wait_s, LIST_EVERY_S) if key in self._listed else LIST_FIRST_S
            self._listed[key] = _Listed(now, self.count_open(key[0]), now + wait_s, wait_s)
        return [request]

    def _is_due(self, key: tuple[int, int], now: float) -> bool:
        """Whether an old process is to be listed now; one that has as many files open as before waits on."""
        listed = self._listed[key]
        if now < listed.due:
            return False
        if now - listed.at >= LIST_EVERY_S or not listed.count or self.count_open(key[0]) != listed.count:
            return True
        wait_s = min(2 * listed.wait_s, LIST_EVERY_S)
        self._listed[key] = _Listed(listed.at, listed.count, min(now + wait_s, listed.at + LIST_EVERY_S), wait_s)
        return False

    def apply(self, answer: Answer[dict[str, list[str]]]) -> None:
        """Reports the files that a worker has found."""
        self._listing = False
        for job_id, paths in (answer.value or {}).items():
            self.found(job_id, paths)
