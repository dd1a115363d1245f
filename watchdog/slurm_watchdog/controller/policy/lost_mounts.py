"""Nodes that a restart avoids, whatever the job died of: their hardware is known to be broken, or they alone have
lost a filesystem which others reach. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from slurm_watchdog.knowledge.local_filesystems import LOCAL_TYPES
from slurm_watchdog.model.incidents import HARDWARE_FAULTS, Incident, IncidentKind, IncidentState
from slurm_watchdog.model.node_view import NodeView, SeenMount
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import HOLDS_NODES


def broken_under(
    job: SlurmJob, incidents: Sequence[Incident], jobs: Collection[SlurmJob]
) -> tuple[tuple[str, str], ...]:
    """(node, sentence) of each place where the hardware is known to have broken under a job, whatever became
    of the job by it.

    A dead rank or a hang after it are the consequence: a restart on the same card would meet it again. A
    fault of a GPU that names no job counts only where the job has the node for itself (of `jobs` some have ended:
    Slurm lists them for minutes).
    """
    found: dict[str, str] = {}
    for incident in incidents:
        if incident.kind not in HARDWARE_FAULTS or incident.state is not IncidentState.FIRING:
            continue
        for node in set(incident.exclude_nodes) & set(job.nodes):
            of_gpu = incident.kind == IncidentKind.GPU_FAULT  # which of a node's jobs computed on it may be unknown
            if job.job_id in incident.jobs_now or (of_gpu and not incident.jobs_now and _is_alone(job, node, jobs)):
                found.setdefault(node, incident.summary)
    return tuple(sorted(found.items()))


def _is_alone(job: SlurmJob, node: str, jobs: Collection[SlurmJob]) -> bool:
    """Whether no other job holds the node."""
    return not any(node in each.nodes and each.state in HOLDS_NODES and each.job_id != job.job_id for each in jobs)


LOST_S = 30.0  # So long a look has to be out: servers fail over in less.
FRESH_S = 120.0  # A look that is older says nothing about now: each mount is looked at every 30 s.


def lost_mounts(
    nodes: Iterable[NodeView], every: Callable[[], Iterable[NodeView]], now: float
) -> tuple[tuple[str, str], ...]:
    """(node, sentence) for each of `nodes` whose own look at a shared filesystem does not return, while more
    of the others reach it than do not. `every`: all nodes there are, asked for only where one of these is in
    trouble.

    A user's child counts for no one, nor does a disk of the node's own: it is as lost to the next job there,
    but no other node can tell.
    """
    out = [
        (node, seen)
        for node in nodes
        for seen in node.mounts
        if _is_current(seen, now) and not seen.probe.responding and seen.probe.seconds >= LOST_S
    ]
    if not out:
        return ()
    everybody = tuple(every())
    found: dict[str, str] = {}
    for node, seen in out:
        words = [
            (each.name, other)
            for each in everybody
            if each.name != node.name
            for other in each.mounts
            if _is_same_filesystem(other, seen, now)
        ]
        reach = [name for name, other in words if other.probe.responding]
        if len(reach) > len(words) - len(reach):
            why = f"its mount of {seen.probe.mount} has not answered for {seen.probe.seconds:.0f} s"
            found.setdefault(node.name, f"{why}, and {_few(reach)} reach{'es' if len(reach) == 1 else ''} it")
    return tuple(sorted(found.items()))


def _is_current(seen: SeenMount, now: float) -> bool:
    probe = seen.probe
    return probe.uid is None and now - seen.at <= FRESH_S and probe.fs_type not in (None, *LOCAL_TYPES)


def _is_same_filesystem(other: SeenMount, seen: SeenMount, now: float) -> bool:
    """Whether it is word about the same filesystem: the place, its type and its server."""
    a, b = other.probe, seen.probe
    return _is_current(other, now) and (a.mount, a.fs_type, a.device) == (b.mount, b.fs_type, b.device)


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} other nodes"
