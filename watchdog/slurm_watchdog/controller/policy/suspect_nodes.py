"""Nodes that failed again and again: which of them a restart avoids, where the site wants that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.controller.policy.placement import free_nodes, may_be_for, objection_to_excluding
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode


class Suspects(StrEnum):
    """What restarts do about suspect nodes."""

    IGNORE = "ignore"
    PREFER = "prefer"
    """Avoid them where enough others are free now."""
    EXCLUDE = "exclude"
    """Avoid them where enough others are there at all: the job may wait for these."""


def suspect_nodes(incidents: Iterable[Incident]) -> tuple[tuple[str, str], ...]:
    """(node, sentence) of each node that an open incident calls suspect, in the order of their incidents."""
    return tuple((node, incident.summary) for incident in incidents for node in suspects_of(incident))


def suspects_of(incident: Incident) -> tuple[str, ...]:
    """The nodes that an incident calls suspect, while it fires."""
    if incident.kind != IncidentKind.SUSPECT_NODE or incident.state is not IncidentState.FIRING:
        return ()
    return tuple(each.node for each in incident.culprits if each.node)


def to_avoid(
    job: SlurmJob,
    suspects: Sequence[tuple[str, str]],
    blamed: Sequence[str],
    how: Suspects,
    known: Sequence[SlurmNode],
    most: int,
) -> tuple[tuple[str, str], ...]:
    """(node, sentence) of the suspects that a restart of `job` avoids beside the nodes in `blamed`, which it avoids
    anyway.

    `known`: all nodes of the cluster. `most`: nodes that the job may be kept from altogether. Only nodes of the
    job's partitions are meant, and never so many that it could not start.
    """
    if how is Suspects.IGNORE or not suspects:
        return ()
    here = {node.name for node in known if may_be_for(job, node)}
    found: list[tuple[str, str]] = []
    for node, why in suspects:
        avoided = (*blamed, *(each for each, _ in found), node)
        if node in blamed or node in job.excluded_nodes or node not in here:
            continue
        if len({*avoided, *job.excluded_nodes}) > most or objection_to_excluding(job, avoided, known) is not None:
            continue
        if how is Suspects.PREFER and free_nodes(job, avoided, known) < (job.node_count or len(job.nodes)):
            continue
        found.append((node, why))
    return tuple(found)
