"""The processes that reports list: so many rows of each kind, shared among the users and the jobs of their node, taken
to the runs of their jobs, with what is known to be missing.

A report has at most 8 MiB (slurm_watchdog.wire.codec), which may be 100,000 rows, every few seconds. Agents send far
fewer; the bounds are for a node that is not ours any more, and for an agent of an older release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from itertools import chain
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.controller.state.filesystems import Filesystems
from slurm_watchdog.controller.state.run import Run, follow_training, is_of_earlier_start
from slurm_watchdog.controller.state.run_updates import note_absent, note_look, note_process, only_trains
from slurm_watchdog.controller.state.runs import Runs
from slurm_watchdog.controller.state.wait_tally import idle_shares
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING

PROCESSES = 4096  # Of one node. A shared node with 256 cores and a rank on each has about 1,000 processes of jobs.
PROCESSES_OF_JOB = 1024  # Of one job on one node: 8 ranks with 64 loaders each, and what they started.
PROCESSES_OF_LARGE = 262_144  # … and on all its nodes, but never less than PROCESSES_AT_LEAST on each.
PROCESSES_AT_LEAST = 128
ROWS: dict[str, int] = {
    "logs": 1024, "events": 8192, "mounts": 64, "hung_probes": 64, "gpus": 128, "node_events": 1024, "checkpoints": 64,
    "gpu_holders": 512, "wishes": 1024, "results": 256, "problems": 64, "left_out": 64,
    "supervisors": 512, "usages": 1024, "pressures": 64, "links": 64,
}  # fmt: skip
"""Rows of one report. What agents send at most: 24 log files and 3,000 lines a job, 16 mounts, 48 hung children, 64
GPUs, 64 directories with checkpoints, 320 events of the node; a node has some dozen jobs at most (its
delivery.stream takes 512)."""
INNER = 4096  # Entries of a list within a row, such as the processes of a GPU; NVML lists no more to an agent.
ORDER = {Role.RANK: 0, Role.WORKER: 1, Role.HELPER: 2}

Known = Callable[[str], Collection[tuple[int, int]]]  # Node -> (pid, start ticks) of its processes that are remembered.

INNER_LISTS = {
    "gpus": ("mig", "throttled", "throttle", "pids", "process_memory_bytes"),
    "gpu_holders": ("gpu_uuids", "minors"),
    "wishes": ("variables",),
}  # Field of a report -> the fields of its rows that hold lists themselves.


def within_bounds(
    report: Report, left_out: LeftOut, known: Known, nodes_of: Callable[[str], int]
) -> tuple[Report, Counter[str]]:
    """The report as far as it is taken over, and of each job how many of its processes were left out. `known` gives
    (pid, start ticks) of the processes of a node that are remembered: they come first, so that one that is left out
    was never there, and no one looks dead for want of room. `nodes_of` says how many nodes a job has."""
    node, kept = report.node, dict[str, Any]()
    for name, limit in ROWS.items():
        rows = getattr(report, name)
        if not rows:
            continue
        if len(rows) > limit:
            rows, lost = fair_share(rows, limit, _owner)
            left_out.note("rows", node, lost.total())
            kept[name] = rows
        inner = INNER_LISTS.get(name, ())
        if inner and any(_is_swollen(row, inner) for row in rows):
            kept[name] = tuple(row for row in rows if not _is_swollen(row, inner))
            left_out.note("rows", node, len(rows) - len(kept[name]))
    processes = _processes(report, left_out, known, nodes_of)
    if len(processes) == len(report.processes):
        return (replace(report, **kept) if kept else report), Counter()
    missing = Counter(row.job_id for row in report.processes) - Counter(row.job_id for row in processes)
    return replace(report, **kept, processes=processes), missing


def _processes(report: Report, left_out: LeftOut, known: Known, nodes_of: Callable[[str], int]) -> tuple[Process, ...]:
    rows, by_job = report.processes, dict[str, list[Process]]()
    if len(rows) <= PROCESSES_AT_LEAST:
        return rows
    for row in rows:
        by_job.setdefault(row.job_id, []).append(row)
    over = {job: share for job, mine in by_job.items() if len(mine) > (share := share_of(nodes_of(job)))}
    if not over and len(rows) <= PROCESSES:
        return rows
    there, lost = frozenset(known(report.node)), Counter[Hashable]()

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
    for name in fields:
        found = getattr(row, name)
        if found and len(found) > INNER:
            return True
    return False


class ReportedProcesses:
    """Which jobs have processes on which node. `job_of`: the job that agents know by an id."""

    def __init__(
        self, runs: Runs, filesystems: Filesystems, left_out: LeftOut, job_of: Callable[[str], SlurmJob | None]
    ):
        self._runs, self._filesystems, self._left_out, self._job_of = runs, filesystems, left_out, job_of
        self._jobs_seen_on: dict[str, tuple[str, ...]] = {}  # Node -> the jobs with processes remembered there.
        self._unlisted_on: dict[str, list[Run]] = {}  # Node -> runs of which its newest report lacks processes.

    def forget(self, node: str) -> None:
        """Nothing of this node is remembered."""
        self._jobs_seen_on.pop(node, None)
        self._unlisted_on.pop(node, None)

    def known_on(self, node: str) -> set[tuple[int, int]]:
        """(pid, start ticks) of the processes that are remembered there."""
        runs = (self._runs.get(job_id) for job_id in self._jobs_seen_on.get(node, ()))
        return {key[1:] for run in runs if run is not None for key in run.on_node.get(node, ())}

    def apply(self, report: Report, made_at: float) -> None:
        """Of the runs that Slurm lists: which of their processes are there, and which are not any more."""
        present: dict[str, set[ProcessKey]] = {}
        name, run, run_of, trains = report.node, None, None, False
        idle = idle_shares(report.gpus)
        for process in report.processes:
            if process.job_id != run_of:
                run, run_of = self._run(process.job_id), process.job_id
                trains = run is not None and run.phase(made_at) is None
            key = (name, process.pid, process.start_ticks)
            if run is None or key in run.left_over or is_of_earlier_start(run, key, process):
                continue
            job = run.job
            present.setdefault(job.job_id, set()).add(key)
            if job.component_ids:
                run.components.setdefault(name, set()).add(process.job_id)
            if process.job_id != job.job_id:
                process = replace(process, job_id=job.job_id)
            if job.state in RUNNING:
                note_process(run, key, process, made_at)
                if process.role is Role.RANK and run.stepped_at is not None:
                    note_look(run, key, process, idle.get(process.pid), made_at, trains=trains)
                if process.blocked is not None:
                    self._filesystems.note_blocked(name, report.boot_id, process, made_at)
        known = sorted(present.keys() | self._jobs_seen_on.get(report.node, ()))
        for job_id in known:
            run = self._runs.get(job_id)
            seen = present.get(job_id, set())
            if run is None:
                continue
            note_absent(run, report.node, seen, made_at)
            if seen and not only_trains(run, run.on_node[report.node]):
                follow_training(run, made_at, report.interval_s)
        self._jobs_seen_on[report.node] = tuple(
            job_id for job_id in known if (run := self._runs.get(job_id)) is not None and run.on_node.get(report.node)
        )

    def note_unlisted(self, report: Report, missing: Mapping[str, int]) -> None:
        """Of each run here how many processes are not among those of the report, or had no room."""
        node, found = report.node, dict(missing)
        for row in report.left_out:
            if row.job_id is not None:
                found[row.job_id] = found.get(row.job_id, 0) + max(0, row.count)
        for before in self._unlisted_on.pop(node, ()):
            before.unlisted.pop(node, None)
            before.note(True)
        for job_id, count in found.items():
            if (run := self._run(job_id)) is not None and node in run.job.nodes:
                run.unlisted[node] = run.unlisted.get(node, 0) + count
                run.note(True)
                self._unlisted_on.setdefault(node, []).append(run)
        for row in report.left_out:
            job = self._job_of(row.job_id) if row.job_id is not None else None
            named = job.job_id if job is not None else None  # of a job that Slurm does not list nothing is repeated
            self._left_out.note("processes", node, max(0, row.count), row.uid, named)

    def _run(self, process_job_id: str) -> Run | None:
        job = self._job_of(process_job_id)
        return self._runs.get(process_job_id if job is None else job.job_id)
