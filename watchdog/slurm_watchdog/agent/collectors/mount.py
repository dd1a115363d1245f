"""Filesystems that jobs use: see slurm_watchdog.agent.mounts.probing, which has them probed.

Sees: whether each filesystem that jobs use answers
From: `statx` that asks the server; with `agent.mount_probe_write` a 4 KiB file as a job's owner, read back
    and removed
How often: every minute, spread over the nodes; 16 mounts, one child each
Never: the node's own `/`, what is in memory only; a write, unless it is turned on
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from slurm_watchdog.agent.collectors.collector import CollectorContext, CollectorSpec
from slurm_watchdog.agent.collectors.presentation import BAD, Family, Row, Table, largest
from slurm_watchdog.agent.mounts.open_mounts import OpenMounts
from slurm_watchdog.agent.mounts.probing import ProbeTarget, wanted_mounts
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.model.observations import LogFile, Process
from slurm_watchdog.model.report import LogSection, MountSection, ProcessSection, Report

Places = tuple[tuple[str, int], ...]
"""(path, user)."""


class MountCollector:
    """Probes what jobs are seen to use."""

    def __init__(self, context: CollectorContext):
        self._prober, self._logs, self._reader = context.mounts, context.logs, context.processes
        self._jobs, self._sections = context.jobs, context.sections
        self._deadline_s = context.settings.probe_deadline
        self._open_mounts = OpenMounts(context.workers)
        self._wanted: dict[str, ProbeTarget] = {}
        self._wanted_for: tuple[Places, tuple[Mount, ...]] = ((), ())
        """The places and mounts from which `_wanted` follows."""

    def collect(self, now: float) -> MountSection:
        """The answers since the last call, and a row for each filesystem whose answer is overdue."""
        processes = self._sections.of(ProcessSection).processes
        self._open_mounts.request_due(processes, now, self._deadline_s)
        question = (self._places(self._sections.of(LogSection).logs, processes), self._logs.mounts)
        if question != self._wanted_for:  # a node has hundreds of mounts, and neither changes in most ticks
            self._wanted_for = question
            self._wanted = wanted_mounts(*question, self._prober.write_on)
        rows = self._prober.collect(now, self._deadline_s, self._wanted)
        return MountSection(mounts=rows, unanswered=self._prober.drain_unanswered())

    def _places(self, logs: tuple[LogFile, ...], processes: tuple[Process, ...]) -> Places:
        """Logs, working directories and checkpoints of jobs that have processes here, then the mounts on
        which these have files open."""
        places = [(os.path.dirname(row.path), self._logs.owner_of(row.job_id)) for row in logs]
        for job_id in self._logs.jobs:
            uid, watch = self._logs.owner_of(job_id), self._jobs.watch.get(job_id)
            named = (
                self._reader.working_directory_of(job_id),
                *(watch.checkpoint_directories if watch else ()),
                *self._reader.checkpoint_directories_of(job_id),
            )
            places += [(path, uid) for path in named if path]
        blocked = (point for each in processes if each.blocked for point in each.blocked.candidates)
        places += [(point, -1) for point in (*blocked, *self._open_mounts.places())]
        return tuple(dict.fromkeys(places))


def tables(report: Report) -> Iterable[Table]:
    """Every filesystem that answered, or should have, in this tick."""
    rows = tuple(
        Row(
            (
                mount.mount, mount.fs_type or "", mount.device or "",
                mount.error or ("yes" if mount.responding else "NO"),
                f"{'wrote' if mount.wrote else 'read'}, {mount.seconds:.3f} s",
            ),
            "" if mount.responding else BAD,
        )
        for mount in report.mounts
    )  # fmt: skip
    yield Table("filesystems", ("mount", "type", "device", "answers", "probe"), rows)


class MountSeconds:
    """The last answer of each mount: a probe answers once a minute, Prometheus asks in between."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def update(self, report: Report) -> None:
        """Keeps what was answered as long as there are jobs here."""
        if not report.processes:
            self._seconds.clear()
        self._seconds.update({probe.mount: probe.seconds for probe in report.mounts})

    def families(self, report: Report) -> Iterable[Family]:
        """One series for each mount."""
        series = largest(((mount,), value) for mount, value in list(self._seconds.items()))
        text = "Time the last probe of a mount took, or has been out."
        yield Family("mount_probe_seconds", "gauge", text, ("mount",), series)


SPEC = CollectorSpec("mount", MountSection, MountCollector, tables, counters=MountSeconds)
