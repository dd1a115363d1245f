"""Filesystems that jobs use: see slurm_watchdog.agent.files.mount_probing, which has them probed.

Sees: whether each filesystem that jobs use answers
From: `statx` that asks the server; with `agent.mount_probe_write` a 4 KiB file as a job's owner, read back
    and removed
How often: every minute, spread over the nodes; 16 mounts, one child each
Never: the node's own `/`, what is in memory only; a write, unless it is turned on
"""

from __future__ import annotations

import os

from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec
from slurm_watchdog.agent.files.mount_probing import ProbeTarget, wanted_mounts
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.model.observations import LogFile, Process
from slurm_watchdog.model.report import LogSection, MountSection, ProcessSection

Places = tuple[tuple[str, int], ...]  # (path, user).


class MountCollector(Collector):
    """Probes what jobs are seen to use."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self._wanted: dict[str, ProbeTarget] = {}
        self._wanted_for: tuple[Places, tuple[Mount, ...]] = ((), ())  # From which `_wanted` follows.

    def collect(self, now: float) -> MountSection:
        """The answers since the last call, and a row for each filesystem whose answer is overdue."""
        processes = self.sections.of(ProcessSection).processes
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
        places += [(point, -1) for point in (*blocked, *self.context.logs.open_files.mounts())]
        return tuple(dict.fromkeys(places))


SPEC = CollectorSpec("mount", MountSection, MountCollector)
