"""Which nodes an incident is held against. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.model.incidents import Culprit, Finding, Incident, IncidentState
from slurm_watchdog.model.node_events import LINK_PLACE, MOUNT_PLACE, NodeEvent

MOST_NODES = 2
"""An incident that names more nodes than this knows of a trouble, and not of a bad node."""
PLACES = frozenset({Subject.NODE, Subject.GPU})
MAX_WHAT = 400
"""Characters of a sentence that are kept: a summary is about half as long."""


def blamed(about: Incident | Finding) -> tuple[tuple[str, str], ...]:
    """(node, part of it or nothing) of each place that an incident or a finding is held against.

    Of a kind that is about jobs these are the nodes that it names as culprits or that a restart should avoid: a
    node that only ran the job is in neither.
    """
    spec = spec_of(about.kind)
    if spec.blames_node <= 0:
        return ()
    places: dict[str, str] = {}
    named = about.culprits if spec.subject in PLACES or not about.mounts else ()
    for culprit in named:
        if culprit.node and (culprit.node not in places or not places[culprit.node]):
            places[culprit.node] = _part_of(culprit)
    for node in about.exclude_nodes:
        places.setdefault(node, _mount_of(about.mounts))
    return tuple(sorted(places.items())) if len(places) <= MOST_NODES else ()


def _part_of(culprit: Culprit) -> str:
    link = LINK_PLACE + culprit.link.partition("/")[0] if culprit.link else ""  # as the kernel names the adapter
    return culprit.gpu_uuid or link or (MOUNT_PLACE + culprit.mount if culprit.mount else "")


def _mount_of(mounts: Sequence[str]) -> str:
    return MOUNT_PLACE + mounts[0] if len(mounts) == 1 else ""


def events_of(incident: Incident, chain: str, *, compared: bool) -> tuple[NodeEvent, ...]:
    """The events that an incident is: one for each node that it is held against; none while it is only suspected,
    and none where another incident explains it.

    `chain`: see NodeEvent. `compared`: its job ran on several nodes. On a single one whatever the program does wrong
    happens there, which says nothing of the node unless its hardware is proven broken.
    """
    if incident.state is IncidentState.PENDING or incident.inhibited_by is not None:
        return ()
    spec = spec_of(incident.kind)
    if spec.subject is Subject.JOB and spec.blames_node < 1.0 and not compared:
        return ()
    return tuple(
        NodeEvent(
            key=f"incident:{incident.id}:{node}",
            node=node,
            kind=incident.kind,
            at=incident.opened_at,
            what=incident.summary[:MAX_WHAT],
            place=place,
            job_id=incident.job_ids[0] if incident.job_ids else "",
            chain=chain,
            incident_id=incident.id,
        )
        for node, place in blamed(incident)
    )
