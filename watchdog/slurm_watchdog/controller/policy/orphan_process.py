"""Decisions about one process that outlived its job: what speaks against touching it, and what counts as one
for the budgets. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import GpuHolder
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import may_hold_nodes

AT_ONCE_S = 600.0
"""Orphans of several jobs that began within so long of each other are no coincidence: it is Slurm's listing
or an outage."""


def objection(process: GpuProcess, node: NodeView | None, reports: bool, jobs: Iterable[SlurmJob]) -> str | None:
    """Why this process must not be touched now; None if nothing speaks against it. `node` is its newest
    report, `jobs` Slurm's listing."""
    if node is None or not reports:
        return f"{process.node} does not report"
    if node.boot_id != process.boot_id:
        return f"{process.node} has been restarted since"
    holder = _holder_of(process, node)
    if holder is None:
        return f"{process.node} does not report it any more"
    if holder.orphan_for_s is None:
        return f"whether its job runs is not known on {process.node}"
    return objection_by_slurm(process, jobs)


def orphan_for_s(process: GpuProcess, node: NodeView | None) -> float | None:
    """For how long it has had no job, by its node's newest report; None if that does not say."""
    holder = _holder_of(process, node) if node is not None else None
    return None if holder is None else holder.orphan_for_s


def _holder_of(process: GpuProcess, node: NodeView) -> GpuHolder | None:
    key = (process.pid, process.start_ticks)
    return next((each for each in node.holders if (each.pid, each.start_ticks) == key), None)


def objection_by_slurm(process: GpuProcess, jobs: Iterable[SlurmJob]) -> str | None:
    """The same as far as Slurm's jobs go: its own must be over, and its user must not have another one there
    that may be using it."""
    for job in jobs:
        if not may_hold_nodes(job.state):
            continue
        if job.process_id == process.job_id:
            return f"job {job.job_id} is {job.state}"
        if (
            job.uid == process.uid
            and (process.node in job.nodes or "nodes" in job.unreadable)
            and not process.in_job_group
        ):
            return f"its user has job {job.job_id} on {process.node} now, which may be using it"
    return None


def job_of(process: GpuProcess, jobs: Iterable[SlurmJob]) -> SlurmJob | None:
    """The job that it came from, while Slurm remembers it."""
    return next((job for job in jobs if job.process_id == process.job_id), None)


def is_same_process(one: GpuProcess | None, other: GpuProcess | None) -> bool:
    """Whether both are the same process."""
    return (
        one is not None
        and other is not None
        and (one.node, one.boot_id, one.pid, one.start_ticks)
        == (other.node, other.boot_id, other.pid, other.start_ticks)
    )


def origin(process: GpuProcess) -> tuple[str, str]:
    """What counts as one: the processes that one job left on one node, a hundred workers perhaps."""
    return process.node, process.job_id
