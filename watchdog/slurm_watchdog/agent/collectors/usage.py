"""What jobs and this node use of their limits: memory, processes, open files, /dev/shm; and what they wait for.

Sees: memory and pids of each job and step with their limits, how many of their processes the kernel killed for
    memory; open files of ranks; memory, pids, open files and /dev/shm of the node; pressure of both; a /dev/shm that
    a job has for itself (job_container/tmpfs, containers)
From: the control groups of jobs (version 1 and 2), `/proc/pressure`, `meminfo`, `loadavg`, `/proc/PID/limits`,
    `/proc/PID/root/dev/shm` in a child
How often: every 30 s while jobs are here; of what is far from its limit only memory is reported
Never: `memory.stat`, but of a group that is nearly full
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

from msgspec.structs import replace

from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ReadSharedMemory
from slurm_watchdog.agent.collectors.collector import (
    Collector,
    CollectorContext,
    CollectorSpec,
)
from slurm_watchdog.agent.proc.control_groups import ROOT, parse_number, parse_pressure, pressures_of, usages_of
from slurm_watchdog.agent.proc.files import count_open_files, read_file
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.observations import Process, Resource, Role, Usage
from slurm_watchdog.model.report import ProcessSection, UsageSection

EVERY_S = 30.0  # A look of a node with 8 ranks takes 2 ms: 0.007 % of a core.
TOLD_FROM = 0.5  # Of a limit other than memory's: what is far from it interests no one.
MAX_RANKS = 64


def _numbers(pattern: bytes, text: bytes | None) -> list[int | None]:
    """The groups of a pattern in a small file; none where it does not match."""
    match = re.search(pattern, text or b"", re.MULTILINE)
    return [parse_number(each) for each in match.groups()] if match is not None else []


def parse_meminfo(text: bytes | None) -> Usage | None:
    """The node's memory, from /proc/meminfo (proc(5)): what could not be had without swapping is in use."""
    found = [_numbers(rb"^Mem%s:\s+(\d{1,15}) kB$" % name, text) for name in (b"Total", b"Available")]
    if not all(found):
        return None
    total, available = ((each or 0) * 1024 for (each,) in found)
    return Usage(resource=Resource.MEMORY, used=max(0, total - available), limit=total)


def parse_threads(loadavg: bytes | None, limits: Iterable[int | None]) -> Usage | None:
    """All processes and threads of the node, from /proc/loadavg, beside the smallest of the kernel's `limits`."""
    found = _numbers(rb"^\S+ \S+ \S+ \d+/(\d{1,15}) \d+$", loadavg)
    limit = min((each for each in limits if each), default=None)
    return Usage(resource=Resource.PIDS, used=found[0] or 0, limit=limit) if found else None


def parse_open_files(file_nr: bytes | None) -> Usage | None:
    """All open files of the node, from /proc/sys/fs/file-nr."""
    found = _numbers(rb"^(\d{1,15})\s+\d+\s+(\d+)$", file_nr)
    return Usage(resource=Resource.FILES, used=found[0] or 0, limit=found[1]) if found else None


def parse_file_limit(limits: bytes | None) -> int | None:
    """How many files a process may have open, from /proc/PID/limits; None where it does not say, or without end."""
    return next(iter(_numbers(rb"^Max open files\s+(\d+)\s", limits)), None)


SHARED_EVERY_S = 120.0  # Between two looks at those that jobs have for themselves: a child takes 2 ms.
MAX_STEPS = 64  # Of a node that are looked at.
OLD_S = 3 * SHARED_EVERY_S  # What was read so long ago is not reported any more.

Place = tuple[str, str | None, int, int]  # Job, step, and of the rank that is asked about pid and start_ticks.


@dataclass
class SharedMemories:
    """Which steps have a /dev/shm of their own, and how full it is: of one process of each, in a child of its own."""

    looks: UserLooks
    _found: dict[Place, tuple[float, int, int] | None] = field(default_factory=dict)
    """Of each step that was asked about: when, bytes in use, and size."""
    _due: float = float("-inf")

    def collect(self, processes: Iterable[Process], now: float, deadline_s: float) -> tuple[Usage, ...]:
        """A row for each step that has one; requests what is due, and takes the answer in a later call. Never waits."""
        of_step: dict[tuple[str, str | None], Process] = {}  # the rank with the smallest pid
        for each in sorted(processes, key=lambda each: each.pid):
            if each.role is Role.RANK and each.state not in ("Z", "X") and len(of_step) < MAX_STEPS:
                of_step.setdefault((each.job_id, each.step_id), each)
        first = {(*step, each.pid, each.start_ticks): each for step, each in of_step.items()}
        self._found = {place: found for place, found in self._found.items() if place in first}
        if first and (now >= self._due or first.keys() - self._found.keys()):
            self._ask(first, now, deadline_s)
        return tuple(
            Usage(resource=Resource.SHARED_MEMORY, used=found[1], limit=found[2], job_id=job, step_id=step)
            for (job, step, _, _), found in self._found.items()
            if found is not None and now - found[0] <= OLD_S
        )

    def _ask(self, first: dict[Place, Process], now: float, deadline_s: float) -> None:
        may = {place: each for place, each in first.items() if self.looks.may_ask(each.pid)}
        for uid in {each.uid for each in may.values()}:
            mine = {place: each.pid for place, each in may.items() if each.uid == uid}
            if self.looks.refusal(uid) is None:
                pids, then = list(mine.values()), partial(self._apply, tuple(mine), now)
                self.looks.ask(uid, ReadSharedMemory(pids), pids, deadline_s, now, then)
        self._due = now + SHARED_EVERY_S
        self._found = {place: self._found.get(place) for place in first}

    def _apply(self, places: tuple[Place, ...], at: float, answer: Answer[list[tuple[int, int] | None]]) -> None:
        for place, found in zip(places, answer.value or (), strict=False):
            self._found[place] = None if found is None else (at, *found)


class UsageCollector(Collector):
    """Looks every EVERY_S, and says the same again in between."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self._due = float("-inf")
        self._found = UsageSection()
        self._shared = SharedMemories(context.processes.looks)

    def collect(self, now: float) -> UsageSection:
        """Nothing while no job is here."""
        processes = self.sections.of(ProcessSection).processes
        if not processes:
            self._due, self._found = float("-inf"), UsageSection()
        elif now >= self._due:
            self._due = now + EVERY_S
            self._found = read_usage(processes)
            own = self._shared.collect(processes, now, self.deadline_s)
            told = tuple(row for row in own if row.ratio >= TOLD_FROM)
            self._found = replace(self._found, usages=(*self._found.usages, *told))
        return self._found


def read_usage(processes: Iterable[Process], root: str = ROOT) -> UsageSection:
    """One look at the node, and at the jobs of these processes."""
    processes = tuple(processes)
    ranks = [each for each in processes if each.role is Role.RANK][:MAX_RANKS] or processes[:MAX_RANKS]
    read = cache(_read)
    cgroups = {(read(f"/proc/{each.pid}/cgroup") or b"").decode(errors="replace") for each in ranks}
    rows = [*_of_node(), *usages_of(cgroups, read, root), *_files_of(ranks)]
    pressures = [parse_pressure(_read(f"/proc/pressure/{name}"), name) for name in ("cpu", "memory", "io")]
    return UsageSection(
        usages=tuple(row for row in rows if row.resource is Resource.MEMORY or row.refused or row.ratio >= TOLD_FROM),
        pressures=(*(row for row in pressures if row is not None), *pressures_of(cgroups, read, root)),
    )


def _read(path: str) -> bytes | None:
    try:
        return read_file(path)
    except OSError:
        return None


def _of_node() -> Iterator[Usage]:
    limits = [parse_number(_read(f"/proc/sys/kernel/{name}")) for name in ("pid_max", "threads-max")]
    memory, threads = parse_meminfo(_read("/proc/meminfo")), parse_threads(_read("/proc/loadavg"), limits)
    files = parse_open_files(_read("/proc/sys/fs/file-nr"))
    yield from (row for row in (memory, threads, files) if row is not None)
    with suppress(OSError):  # there is none
        shm = os.statvfs("/dev/shm")
        used, limit = (shm.f_blocks - shm.f_bfree) * shm.f_frsize, shm.f_blocks * shm.f_frsize
        yield Usage(resource=Resource.SHARED_MEMORY, used=used, limit=limit or None)


def _files_of(ranks: Iterable[Process]) -> Iterator[Usage]:
    of_rank = ("job_id", "step_id", "pid", "rank")
    for rank in ranks:
        used = count_open_files(rank.pid)
        if used and (limit := parse_file_limit(_read(f"/proc/{rank.pid}/limits"))):
            yield picked(Usage, rank, *of_rank, resource=Resource.FILES, used=used, limit=limit)


SPEC = CollectorSpec("usage", UsageSection, UsageCollector)
