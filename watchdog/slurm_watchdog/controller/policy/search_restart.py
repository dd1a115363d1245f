"""Which nodes the next restart of a job leaves out so that it tells which of them makes the job slow. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from slurm_watchdog.analysis.slow_node_search import judge, leave_out
from slurm_watchdog.controller.policy.placement import free_nodes, objection_to_excluding
from slurm_watchdog.model.kill_switch import MAX_FIELD
from slurm_watchdog.model.slow_search import JobSearch
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.supervisor import SupervisorStatus

EXCLUDED_WHY = "slow_search"
"""Reason of such an exclusion in the journal: it ends with the restart."""


def _wanted(search: JobSearch, at_most: int) -> tuple[str, ...]:
    """The nodes that the next run should do without, `at_most` so many; the same for the same runs."""
    verdict = judge(search.search)
    if verdict.over:
        return tuple(each.node for each in verdict.named)[:at_most]
    return leave_out(verdict, at_most, random.Random(f"{search.incident_id}/{len(search.search.runs)}"))


def to_leave_out_in_place(
    search: JobSearch | None, avoided: Sequence[str], supervisor: SupervisorStatus | None
) -> tuple[str, ...]:
    """The same of a restart within the allocation: as many as it has spares for, beside those that take the place of
    `avoided`; none where its supervisor does not know how."""
    if search is None or supervisor is None or not supervisor.takes_once:
        return ()
    usable = {*supervisor.nodes, *supervisor.spares}.difference(avoided)
    room, letters, found = len(supervisor.spares) - len(avoided), 0, list[str]()
    for node in _wanted(search, len(search.search.suspects)):
        letters += len(node) + 1
        if node in usable and len(found) < room and letters <= MAX_FIELD:
            found.append(node)
    return tuple(found)


def to_leave_out(
    job: SlurmJob,
    search: JobSearch | None,
    avoided: Sequence[str],
    known: Sequence[SlurmNode],
    most: int,
) -> tuple[str, ...]:
    """Nodes that a requeue leaves out for the search, beside those in `avoided`, which it leaves out anyway.

    Only as many as others are free for at this moment, so that the job waits for none, and no more than `most`
    exclusions in all.
    """
    if search is None:
        return ()
    needed, whole = job.node_count or len(job.nodes), (*avoided, *job.excluded_nodes)
    at_most = min(free_nodes(job, avoided, known) - needed, most - len(set(whole)))
    found = tuple(node for node in _wanted(search, max(0, at_most)) if node not in whole)
    return found if found and objection_to_excluding(job, (*avoided, *found), known) is None else ()
