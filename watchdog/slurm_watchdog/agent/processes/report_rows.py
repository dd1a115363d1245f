"""Which processes a report names one by one, where there are many; and a report that is small enough to be sent. Pure.

Helpers of a job (shells, compilers, the short programs of `xargs -P 128`) say little about a training, and
come and go by the thousand.
Ranks and what descends from them are named as long as there is room; of users with too many each has the same share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from slurm_watchdog.agent.proc.entry import HANGS, Key
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import LeftOut, Report

HELPERS_OF_JOB = 64  # Of one job on one node, beside those that hang: shells, launchers and `tee` are a dozen.
PROCESSES = 2048  # Of a node. About 300 bytes each; the controller takes 4,096 (state.door).
MAX_SAID = 64  # Jobs and users for which it is reported how much was left out.
FEW_EVENTS = 200
LONGEST_NAME = 1024  # Characters of a path in a report that was too large otherwise.
ORDER = {Role.RANK: 0, Role.WORKER: 1, Role.HELPER: 2}

NO_CROWD: Mapping[tuple[str, int], int] = MappingProxyType({})


def choose(
    processes: tuple[Process, ...],
    told: Collection[Key],
    limit: int = PROCESSES,
    crowd: Mapping[tuple[str, int], int] = NO_CROWD,
) -> tuple[tuple[Process, ...], tuple[LeftOut, ...]]:
    """The processes that are named, and how many are not, by job and user. `told` are those of the report
    before: they are named first, so that no one who is there looks gone. `crowd`: how many more there are
    that no one looked at now, by job and user."""
    helpers = Counter(row.job_id for row in processes if _is_quiet(row))
    if len(processes) <= limit and all(count <= HELPERS_OF_JOB for count in helpers.values()):
        return processes, _said(Counter(crowd))

    def order(row: Process) -> tuple[bool, int, bool, int]:
        # What runs comes before what sleeps: whether anything of a job still works matters at its end.
        return ((row.pid, row.start_ticks) not in told, ORDER[row.role], row.state != "R", row.start_ticks)

    kept: set[Key] = {(row.pid, row.start_ticks) for row in processes if not _is_quiet(row)}
    for job_id in helpers:
        mine = [row for row in processes if row.job_id == job_id and _is_quiet(row)]
        mine.sort(key=order)
        kept.update((row.pid, row.start_ticks) for row in mine[:HELPERS_OF_JOB])
    rows = tuple(row for row in processes if (row.pid, row.start_ticks) in kept)
    rows, _ = fair_share(rows, limit, lambda row: row.uid, order)
    there = {(row.pid, row.start_ticks) for row in rows}
    lost = Counter((row.job_id, row.uid) for row in processes if (row.pid, row.start_ticks) not in there)
    return rows, _said(lost + Counter(crowd))


def _said(lost: Counter[tuple[str, int]]) -> tuple[LeftOut, ...]:
    return tuple(LeftOut(job_id=job, uid=uid, count=count) for (job, uid), count in lost.most_common(MAX_SAID))


def _is_quiet(row: Process) -> bool:
    """A helper about which there is nothing to say."""
    if row.role is not Role.HELPER:
        return False
    return row.blocked is None and not (row.state in HANGS and row.state_age_s is not None)


def reduced(report: Report, why: str) -> Report:
    """The report without most of what may be long, for one that was too large to be sent. Every process that
    it names stays, for one that is missing looks dead; of what it waits for only short names stay."""
    return replace(
        report,
        processes=tuple(map(_shortened, report.processes)),
        events=report.events[-FEW_EVENTS:],
        events_dropped=report.events_dropped + max(0, len(report.events) - FEW_EVENTS),
        results=tuple(
            CommandResult(command_id=each.command_id, ok=False, error="the answer was too large to be sent")
            for each in report.results
        ),
        problems=(f"report: {why}", *report.problems),
    )


def _shortened(row: Process) -> Process:
    call = row.blocked
    if call is None:
        return row
    names = {
        name: value if (value := getattr(call, name)) is not None and len(value) <= LONGEST_NAME else None
        for name in ("path", "mount", "device")
    }
    return replace(row, blocked=replace(call, **names))
