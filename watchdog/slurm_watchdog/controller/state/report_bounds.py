"""What is taken of one report: so many rows of each kind, shared among the users and the jobs of its node. Pure.

A report has at most 8 MiB (slurm_watchdog.wire.codec), which may be 100,000 rows, every few seconds. Agents
send far fewer than these bounds, which are for a node that is not ours any more; and an agent of an older
release sends every process of its node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from itertools import chain

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.report import Report

PROCESSES = 4096  # Of one node. A shared node with 256 cores and a rank on each has about 1,000 processes of jobs.
PROCESSES_OF_JOB = 1024  # Of one job on one node: 8 ranks with 64 loaders each, and what they started.
PROCESSES_OF_LARGE = 262_144
"""… and of one job on all its nodes: one that has more than 256 nodes has less on each, but never less than
PROCESSES_AT_LEAST."""
PROCESSES_AT_LEAST = 128
ROWS: dict[str, int] = {
    "logs": 1024, "events": 8192, "mounts": 64, "hung_probes": 64, "gpus": 128, "node_events": 1024, "checkpoints": 512,
    "gpu_holders": 512, "wishes": 1024, "results": 256, "problems": 64, "left_out": 64,
    "supervisors": 512, "usages": 1024, "pressures": 64, "links": 64,
}  # fmt: skip
"""Rows of one report. What agents send at most: 24 log files and 3,000 lines a job, 16 mounts, 48 hung
children, 64 GPUs, 320 events of the node; a node has some dozen jobs at most
(slurm_watchdog.agent.delivery.channel takes 512)."""
INNER = 4096  # Entries of a list within a row, such as the processes of a GPU; NVML lists no more to an agent.
ORDER = {Role.RANK: 0, Role.WORKER: 1, Role.HELPER: 2}


INNER_LISTS = {
    "gpus": ("mig", "throttle", "pids", "process_memory_bytes"),
    "gpu_holders": ("gpu_uuids", "minors"),
    "wishes": ("variables",),
}
"""Field of a report -> the fields of its rows that hold lists themselves."""


def within_bounds(
    report: Report, left_out: LeftOut, known: Callable[[], Collection[tuple[int, int]]], nodes_of: Callable[[str], int]
) -> tuple[Report, Counter[str]]:  # fmt: skip
    """The report as far as it is taken over, and of each job how many of its processes were left out.

    `known` gives (pid, start ticks) of the processes of this node that are remembered: they come first, so
    that one that is left out was never there, and no one looks dead for want of room. `nodes_of` says how
    many nodes a job has.
    """
    node, kept = report.node, {}
    for name, limit in ROWS.items():
        rows = getattr(report, name)
        if len(rows) > limit:
            rows, lost = fair_share(rows, limit, _owner)
            left_out.note("rows", node, lost.total())
            kept[name] = rows
        inner = INNER_LISTS.get(name, ()) if rows else ()
        if inner and any(_is_swollen(row, inner) for row in rows):
            kept[name] = tuple(row for row in rows if not _is_swollen(row, inner))
            left_out.note("rows", node, len(rows) - len(kept[name]))
    processes = _processes(report, left_out, known, nodes_of)
    if len(processes) == len(report.processes):
        return (replace(report, **kept) if kept else report), Counter()
    missing = Counter(row.job_id for row in report.processes) - Counter(row.job_id for row in processes)
    return replace(report, **kept, processes=processes), missing


def _processes(
    report: Report, left_out: LeftOut, known: Callable[[], Collection[tuple[int, int]]], nodes_of: Callable[[str], int]
) -> tuple[Process, ...]:
    rows, by_job = report.processes, dict[str, list[Process]]()
    if len(rows) <= PROCESSES_AT_LEAST:
        return rows
    for row in rows:
        by_job.setdefault(row.job_id, []).append(row)
    over = {job: share for job, mine in by_job.items() if len(mine) > (share := share_of(nodes_of(job)))}
    if not over and len(rows) <= PROCESSES:
        return rows
    there, lost = frozenset(known()), Counter[Hashable]()

    def order(row: Process) -> tuple[bool, int]:
        return ((row.pid, row.start_ticks) not in there, ORDER[row.role])

    for job, share in over.items():
        mine, cut = fair_share(by_job[job], share, _uid, order)
        by_job[job], lost = list(mine), lost + cut
    rows, cut = fair_share(tuple(chain(*by_job.values())) if over else rows, PROCESSES, _uid, order)
    for uid, count in (lost + cut).items():
        left_out.note("processes", report.node, count, uid if isinstance(uid, int) else None)
    return rows


def share_of(nodes: int) -> int:
    """Processes of a job with so many nodes that are taken on each of them."""
    return max(PROCESSES_AT_LEAST, min(PROCESSES_OF_JOB, PROCESSES_OF_LARGE // max(1, nodes)))


def _uid(row: Process) -> Hashable:
    return row.uid


def _owner(row: object) -> Hashable:
    """Whose share a row is of: its job's, its user's, else the node's."""
    job = getattr(row, "job_id", None)
    return job if job is not None else getattr(row, "uid", None)


def _is_swollen(row: object, fields: tuple[str, ...]) -> bool:
    return any(len(getattr(row, name) or ()) > INNER for name in fields)
