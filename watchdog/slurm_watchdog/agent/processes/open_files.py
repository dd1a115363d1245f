"""Whose open files are listed when: logs to follow, and filesystems that jobs use. Of a new process at once and soon
again, of an old one seldom; several in one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest

from slurm_watchdog.agent.children.answers import OpenFiles
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ListOpenFiles
from slurm_watchdog.agent.processes.user_looks import APART, UserLooks
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import Process, Role

LIST_FIRST_S, LIST_EVERY_S = 10.0, 300.0
"""Between two lists of a process's open files: it doubles. A trainer opens its log in its first minutes, if
not at once; a list of 160 descriptors costs a millisecond."""
MAPPED_FROM_S = 20.0  # Its data are mapped by then, most often; 16,000 mappings of one rank take 15 ms.
TOGETHER_S = 60.0  # Ranks that are due within so long are listed with the first.
AT_ONCE = 16  # Ranks in one tick, the users in turn.
LISTED_IN_TURN = 3  # Other old processes in one tick: 180 in LIST_EVERY_S.
MAX_LISTED = 128  # New ones.
MAX_OF_JOB = 8  # Filesystems of one job that are kept: jobs have been seen to use five.
KEPT_S = 900.0  # So long a filesystem counts as used after a look that found it: files are closed between epochs.

Key = tuple[int, int]  # (pid, start ticks).


@dataclass
class OpenFilesSchedule:
    """What is asked, and which filesystems jobs use, as far as that has shown. One loop owns it."""

    looks: UserLooks
    found_logs: Callable[[str, tuple[str, ...]], None]  # Given a job, and the logs that its processes have open.
    _due: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """Of each that was listed: when it is to be listed again, and how long that is after the last time."""
    _used: dict[str, dict[str, float]] = field(default_factory=dict)  # Job -> mount point -> when it was last in use.

    def ask(self, processes: Iterable[Process], now: float, deadline_s: float) -> list[int]:
        """Asks whose open files are due; returns the numbers of the requests for whose answers it is worth to wait."""
        living = {(p.pid, p.start_ticks): p for p in processes if p.state not in ("Z", "X")}
        self._due = {key: due for key, due in self._due.items() if key in living}
        jobs = {process.job_id for process in living.values()}
        self._used = {
            job: {at: seen for at, seen in used.items() if now - seen <= KEPT_S}
            for job, used in self._used.items()
            if job in jobs
        }
        groups: dict[tuple[int, str], list[Process]] = {}
        for process in map(living.__getitem__, self._chosen(living, now)):
            if self.looks.may_ask(process.pid) and self.looks.refusal(process.uid) is None:
                # Mappings apart: they take the lock of a process's memory.
                suffix = APART if self._maps(process) else ""
                groups.setdefault((process.uid, suffix), []).append(process)
        asked = [(suffix, self._ask(uid, suffix, mine, now, deadline_s)) for (uid, suffix), mine in groups.items()]
        return [number for suffix, number in asked if number is not None and not suffix]

    def _chosen(self, living: dict[Key, Process], now: float) -> Iterator[Key]:
        new = sorted(living.keys() - self._due.keys(), key=lambda key: (living[key].role is not Role.RANK, key))
        old = sorted(self._due, key=lambda key: (self._due[key][0], key))
        ranks = [key for key in old if living[key].role is Role.RANK and self._due[key][0] <= now + TOGETHER_S]
        if ranks and self._due[ranks[0]][0] > now:
            ranks = []
        others = (key for key in old if living[key].role is not Role.RANK and self._due[key][0] <= now)
        taken, _ = fair_share(ranks, AT_ONCE, lambda key: living[key].uid)
        rest, _ = fair_share(tuple(others), LISTED_IN_TURN, lambda key: living[key].uid)
        return chain(new[:MAX_LISTED], taken, rest)

    def _maps(self, process: Process) -> bool:
        _, wait_s = self._due.get((process.pid, process.start_ticks), (0.0, 0.0))
        return process.role is Role.RANK and wait_s >= MAPPED_FROM_S

    def _ask(self, uid: int, suffix: str, mine: list[Process], now: float, deadline_s: float) -> int | None:
        request = ListOpenFiles([(each.job_id, each.pid, each.role, bool(suffix)) for each in mine])
        pids = [each.pid for each in mine]
        number = self.looks.ask(uid, request, pids, deadline_s, now, partial(self.apply, now), suffix)
        if number is not None:
            for key in ((each.pid, each.start_ticks) for each in mine):
                wait_s = min(2 * self._due[key][1], LIST_EVERY_S) if key in self._due else LIST_FIRST_S
                self._due[key] = (now + wait_s, wait_s)
        return number

    def apply(self, asked_at: float, answer: Answer[dict[str, OpenFiles]]) -> None:
        """Takes what a child has found."""
        for job_id, files in (answer.value or {}).items():
            self.found_logs(job_id, files.logs)
            used = self._used.setdefault(job_id, {})
            for point in files.mounts:
                if point in used or len(used) < MAX_OF_JOB:
                    used[point] = asked_at

    def mounts(self) -> list[str]:
        """The mount points that jobs use, one of each job in turn."""
        turns = zip_longest(*(list(points) for points in self._used.values()))
        return list(dict.fromkeys(point for turn in turns for point in turn if point is not None))
