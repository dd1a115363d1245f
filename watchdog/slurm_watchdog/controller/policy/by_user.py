"""Whose trouble and whose actions: guards count users, for one user may have as many jobs as he likes. Pure.

A user whose jobs all hang says little about the fabric, and must not keep others from being helped: neither
by what he makes look like a storm, nor by using up the budget. Who is not known counts as one user, and is
given nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.controller.policy.orphan_process import AT_ONCE_S, origin
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.actions import Decision
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentState

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
        if each.kind is not incident.kind or each.state is not IncidentState.FIRING:
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
    """Why the budget of `allowed` actions has none left for this user; None if it has.

    Where there are `others` a user may have half of it (at least one action), and of what another one has had
    no more than half counts against him: with a budget of one, each of two users may have one, unless a site
    allows one in all (`most`).
    """
    half = max(1, allowed // 2)
    whole = min(most, max(allowed, 2 * half)) if others else allowed
    own = spent[uid]
    used = own + sum(
        count if who is None or uid is None else min(count, half) for who, count in spent.items() if who != uid
    )
    if used >= whole:
        return f"the budget is {whole}"
    return f"one user may have half of the budget of {allowed}" if others and own >= half else None
