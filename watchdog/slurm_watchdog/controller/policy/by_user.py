"""Whose trouble and whose actions: guards count users, for one user may have as many jobs as he likes. Pure.

A user whose jobs all hang says little about the fabric, and must not keep others from being helped: neither by what he
makes look like a storm, nor by using up the budget. Who is not known counts as one user, and is given nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.actions import Decision
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentState
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import GpuHolder
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import may_hold_nodes

AT_ONCE_S = 600.0  # Orphans of several jobs that began so close together: it is Slurm's listing or an outage.


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


Uid = int | None  # None: not known.
Trouble = dict[str, dict[Uid, set[str]]]  # Kind -> user -> his jobs with an incident of that kind.


class Crowd(Struct):
    """How many have the same trouble at once."""

    users: int = 0
    own: int = 0  # Jobs of the user that the incident concerns, this one included.


def in_trouble(incidents: Iterable[Incident], owner_of: Callable[[str], Uid]) -> Trouble:
    """The jobs of the incidents of each kind that fire and that no other one explains, by their users."""
    found: Trouble = {}
    for incident in incidents:
        firing = incident.state is IncidentState.FIRING and incident.inhibited_by is None
        if firing and not spec_of(incident.kind).planned:
            users = found.setdefault(incident.kind, {})
            for job_id in incident.job_ids:
                users.setdefault(owner_of(job_id), set()).add(job_id)
    return found


def crowd_of(trouble: Trouble, kind: str, uid: Uid) -> Crowd:
    """How many users have this trouble, and how many jobs of this one."""
    users = trouble.get(kind, {})
    return Crowd(users=len(users), own=len(users.get(uid, ())))


def orphans_at_once(incident: Incident, mine: GpuProcess, incidents: Iterable[Incident]) -> Crowd:
    """Of whose jobs processes became orphans at about the same time as `mine`, of this incident; its own included."""
    jobs: dict[int, set[str]] = {}
    for each in incidents:
        if each.kind != incident.kind or each.state is not IncidentState.FIRING:
            continue
        if abs(each.opened_at - incident.opened_at) <= AT_ONCE_S:
            for process in each.processes:
                jobs.setdefault(process.uid, set()).add(process.job_id)
    return Crowd(users=len(jobs), own=len(jobs.get(mine.uid, ())))


def owner_of(decision: Decision) -> Uid:
    """Whose job or process a decision is about."""
    return decision.process.uid if decision.process is not None else decision.uid


def spent_on_jobs(decisions: Iterable[Decision], now: float, window_s: float) -> Counter[Uid]:
    """Actions on jobs within the window, by user; what a person asked for, and what was planned, is not among them."""
    return Counter(
        owner_of(each)
        for each in decisions
        if now - each.decided_at < window_s and not (each.asked_by or each.process or spec_of(each.by).planned)
    )


def spent_on_processes(decisions: Iterable[Decision], process: GpuProcess, now: float, window_s: float) -> Counter[Uid]:
    """Other origins' processes that were acted on within the window, by user; those that one job left on one
    node count as one."""
    found = {
        (each.process.uid, origin(each.process))
        for each in decisions
        if each.process is not None and now - each.decided_at < window_s
    }
    return Counter(uid for uid, where in found if where != origin(process))


def over_budget(spent: Counter[Uid], uid: Uid, allowed: int, most: int, others: bool) -> str | None:
    """Why the budget of `allowed` actions has none left for this user; None if it has. Where there are `others` a user
    may have half of it (at least one action), and of what another one has had no more than half counts against him:
    with a budget of one, each of two users may have one, unless a site allows one in all (`most`)."""
    half = max(1, allowed // 2)
    whole = min(most, max(allowed, 2 * half)) if others else allowed
    own = spent[uid]
    used = own + sum(
        count if who is None or uid is None else min(count, half) for who, count in spent.items() if who != uid
    )
    if used >= whole:
        return f"the budget is {whole}"
    return f"one user may have half of the budget of {allowed}" if others and own >= half else None
