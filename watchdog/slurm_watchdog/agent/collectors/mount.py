"""Filesystems that jobs use: see slurm_watchdog.agent.files.mount_probing, which has them probed.

Sees: whether each filesystem that jobs use answers
From: `statx` that asks the server; with `agent.mount_probe_write` a 4 KiB file as a job's owner, read back
    and removed
How often: every minute, spread over the nodes; 16 mounts, one child each
Never: the node's own `/`, what is in memory only; a write, unless it is turned on
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ListOpenMounts
from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec
from slurm_watchdog.agent.files.mount_probing import ProbeTarget, wanted_mounts
from slurm_watchdog.agent.processes.user_looks import APART, UserLooks
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.model.observations import LogFile, Process, Role
from slurm_watchdog.model.report import LogSection, MountSection, ProcessSection

FIRST_S = 30.0  # A trainer has opened its data by then, most often; what it opens later is found with the next look.
EVERY_S = 300.0  # Between two looks at a process: it doubles up to this.
AT_ONCE = 16  # Processes in one look, the users in turn: 16,000 mappings of one rank take 15 ms.
TOGETHER_S = 60.0  # Those that are due within so long are looked at with the first: a child is started once for all.
MAX_OF_JOB = 8  # Filesystems of one job that are kept: jobs have been seen to use five.
KEPT_S = 900.0  # So long a filesystem counts as used after a look that found it: files are closed between epochs.


@dataclass
class OpenMounts:
    """Which filesystems jobs use, by their processes' files. One loop owns it."""

    looks: UserLooks
    _due: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(pid, start) -> when its files are to be listed, and how long that is after the last time."""
    _seen: dict[str, dict[str, float]] = field(default_factory=dict)  # Job -> mount point -> when it was last in use.

    def request_due(self, processes: Iterable[Process], now: float, deadline_s: float) -> None:
        """Requests the files of those processes that are due; the answer counts from the next call on."""
        mine = {(p.pid, p.start_ticks): p for p in processes if p.role is not Role.HELPER and p.state not in ("Z", "X")}
        self._due = {key: self._due.get(key) or (now + FIRST_S * (1 + key[0] % 7 / 7), FIRST_S) for key in mine}
        self._forget({p.job_id for p in mine.values()}, now)
        due = sorted((at, key) for key, (at, _) in self._due.items() if now + TOGETHER_S >= at)
        if not due or due[0][0] > now:
            return
        taken, _ = fair_share([key for _, key in due], AT_ONCE, lambda key: mine[key].uid)
        for uid in {mine[key].uid for key in taken}:
            keys = [key for key in taken if mine[key].uid == uid and self.looks.may_ask(key[0])]
            if keys and self.looks.refusal(uid) is None:
                self._ask(uid, [mine[key] for key in keys], deadline_s, now)

    def _ask(self, uid: int, processes: list[Process], deadline_s: float, now: float) -> None:
        question = ListOpenMounts([(each.job_id, each.pid, each.role is Role.RANK) for each in processes])
        pids = [each.pid for each in processes]
        # In a child of its own: `maps` takes the lock of a process's memory, and 16,000 mappings take 15 ms.
        if self.looks.ask(uid, question, pids, deadline_s, now, partial(self._apply, now), APART) is None:
            return
        for key in ((each.pid, each.start_ticks) for each in processes):
            wait_s = min(2 * self._due[key][1], EVERY_S)
            self._due[key] = (now + wait_s, wait_s)

    def places(self) -> list[str]:
        """The mount points, one of each job in turn."""
        turns = zip_longest(*(list(points) for points in self._seen.values()))
        return list(dict.fromkeys(point for turn in turns for point in turn if point is not None))

    def _apply(self, asked_at: float, answer: Answer[dict[str, list[str]]]) -> None:
        for job_id, points in (answer.value or {}).items():
            seen = self._seen.setdefault(job_id, {})
            for point in points:
                if point in seen or len(seen) < MAX_OF_JOB:
                    seen[point] = asked_at

    def _forget(self, jobs: set[str], now: float) -> None:
        self._seen = {
            job_id: {point: at for point, at in points.items() if now - at <= KEPT_S}
            for job_id, points in self._seen.items()
            if job_id in jobs
        }


Places = tuple[tuple[str, int], ...]  # (path, user).


class MountCollector(Collector):
    """Probes what jobs are seen to use."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self._open_mounts = OpenMounts(context.processes.looks)
        self._wanted: dict[str, ProbeTarget] = {}
        self._wanted_for: tuple[Places, tuple[Mount, ...]] = ((), ())  # From which `_wanted` follows.

    def collect(self, now: float) -> MountSection:
        """The answers since the last call, and a row for each filesystem whose answer is overdue."""
        processes = self.sections.of(ProcessSection).processes
        self._open_mounts.request_due(processes, now, self.deadline_s)
        question = (self._places(self.sections.of(LogSection).logs, processes), self.context.logs.mounts)
        if question != self._wanted_for:  # a node has hundreds of mounts, and neither changes in most ticks
            self._wanted_for = question
            self._wanted = wanted_mounts(*question, self.context.mounts.write_on)
        rows = self.context.mounts.collect(now, self.deadline_s, self._wanted)
        return MountSection(mounts=rows)

    def _places(self, logs: tuple[LogFile, ...], processes: tuple[Process, ...]) -> Places:
        """Logs, working directories, checkpoints of jobs with processes here, then mounts with open files of theirs."""
        places = [(os.path.dirname(row.path), self.context.logs.owner_of(row.job_id)) for row in logs]
        for job_id in self.context.logs.jobs:
            uid, watch = self.context.logs.owner_of(job_id), self.context.jobs.watch.get(job_id)
            named = (
                self.context.processes.working_directory_of(job_id),
                *(watch.checkpoint_directories if watch else ()),
                *self.context.processes.checkpoint_directories_of(job_id),
            )
            places += [(path, uid) for path in named if path]
        blocked = (point for each in processes if each.blocked for point in each.blocked.candidates)
        places += [(point, -1) for point in (*blocked, *self._open_mounts.places())]
        return tuple(dict.fromkeys(places))


SPEC = CollectorSpec("mount", MountSection, MountCollector)
