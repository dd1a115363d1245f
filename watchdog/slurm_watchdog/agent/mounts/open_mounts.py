"""The filesystems on which ranks and their workers have files open or mapped: data sets, software. They are
probed like those of logs.

Processes are looked at in turn, in a child of its own (`open-mounts`): the table of mapped files may not come
(slurm_watchdog.agent.proc.mapped_files), and then nothing else waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import ListOpenMounts
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import Process, Role

KEY: Final = "open-mounts"
IDLE_S: Final = 30.0
"""Without a question for so long its child ends: it costs 3 MiB, and starting one 2 ms."""
FIRST_S: Final = 30.0
"""A trainer has opened its data by then, most often; what it opens later is found with the next look."""
EVERY_S: Final = 300.0
"""Between two looks at a process: it doubles up to this."""
AT_ONCE: Final = 8
"""Processes in one look, the users in turn: 16,000 mappings of one rank take 15 ms."""
MAX_OF_JOB: Final = 8
"""Filesystems of one job that are kept: jobs have been seen to use five."""
KEPT_S: Final = 900.0
"""So long a filesystem counts as used after the last look that found it: a file is closed between two epochs."""


@dataclass(frozen=True)
class _Due:
    at: float
    wait_s: float


@dataclass
class OpenMounts:
    """Which filesystems jobs use, by their processes' files. One loop owns it."""

    probes: WorkerPool
    _due: dict[tuple[int, int], _Due] = field(default_factory=dict)
    """By (pid, start)."""
    _seen: dict[str, dict[str, float]] = field(default_factory=dict)
    """Job -> mount point -> when it was seen in use last."""
    _asked_at: float = 0.0
    _asking: bool = False

    def request_due(self, processes: Iterable[Process], now: float, deadline_s: float) -> None:
        """Requests the files of those processes that are due; the answer counts from the next call on."""
        mine = {(p.pid, p.start_ticks): p for p in processes if p.role is not Role.HELPER and p.state not in ("Z", "X")}
        self._due = {key: self._due.get(key) or _Due(now + FIRST_S * (1 + key[0] % 7 / 7), FIRST_S) for key in mine}
        self._forget({p.job_id for p in mine.values()}, now)
        due = sorted((each.at, key) for key, each in self._due.items() if now >= each.at)
        if self._asking or not due:
            return
        taken, _ = fair_share([key for _, key in due], AT_ONCE, lambda key: mine[key].uid)
        question = ListOpenMounts([(mine[key].job_id, key[0], mine[key].role is Role.RANK) for key in taken])
        asked = self.probes.ask(KEY, question, deadline_s, now, self._apply, idle_s=IDLE_S)
        if asked is None:
            return
        self._asking, self._asked_at = True, now
        for key in taken:
            wait_s = min(2 * self._due[key].wait_s, EVERY_S)
            self._due[key] = _Due(now + wait_s, wait_s)

    def places(self) -> list[str]:
        """The mount points, one of each job in turn."""
        turns = zip_longest(*(list(points) for points in self._seen.values()))
        return list(dict.fromkeys(point for turn in turns for point in turn if point is not None))

    def _apply(self, answer: Answer[dict[str, list[str]]]) -> None:
        self._asking = False
        for job_id, points in (answer.value or {}).items():
            seen = self._seen.setdefault(job_id, {})
            for point in points:
                if point in seen or len(seen) < MAX_OF_JOB:
                    seen[point] = self._asked_at

    def _forget(self, jobs: set[str], now: float) -> None:
        self._seen = {
            job_id: {point: at for point, at in points.items() if now - at <= KEPT_S}
            for job_id, points in self._seen.items()
            if job_id in jobs
        }
