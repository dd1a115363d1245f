"""Whether a job could still be placed if it had to avoid some nodes, and which suspect nodes it avoids. Pure.

An exclusion that leaves too few nodes makes a job wait indefinitely, which is worse than the node it avoids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.knowledge.syscalls import LOCAL_TYPES
from slurm_watchdog.model.incidents import HARDWARE_FAULTS, Incident, IncidentKind, IncidentState
from slurm_watchdog.model.node_view import NodeView, SeenMount
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import COMES, HOLDS_NODES, WAITING, node_words, starts_jobs


def objection_to_excluding(job: SlurmJob, nodes: Sequence[str], known: Sequence[SlurmNode]) -> str | None:
    """Why `nodes` must not be added to the exclusions of `job`, a sentence; None if it can still run without them.
    `known` are all nodes of the cluster. A job that needs certain nodes (--nodelist) is never kept from one of those.
    Which nodes its constraints, its size and its reservation leave is not known here: nodes that it has run on are sure
    to fit, others of its partition are counted in their favour. A node that is switched off to save power counts: Slurm
    switches it on. One under maintenance counts for a job of a reservation, which may be the one that maintains it."""
    names = ", ".join(nodes)
    if job.het_job_id:
        return (
            f"{names} is not excluded: Slurm gives one list to all components of a heterogeneous job, and "
            f"each has its own"
        )
    required = [node for node in nodes if node in job.required_nodes]
    if required:
        return f"{', '.join(required)} is not excluded: the job was submitted for it (--nodelist)"
    wanted = job.node_count or len(job.nodes)
    in_maintenance = bool(job.reservation)
    partitions = set(job.partition.split(",")) - {""}
    avoided = {*nodes, *job.excluded_nodes}
    members, left = _count(known, partitions, avoided, wanted, in_maintenance)
    if not members:  # a Slurm that does not tell partitions
        members, left = _count(known, None, avoided, wanted, in_maintenance)
    if members and left < wanted:
        return f"{names} is not excluded: the job needs {wanted} nodes, and only {left} would be left that can start it"
    return None


def free_nodes(job: SlurmJob, avoided: Sequence[str], known: Sequence[SlurmNode]) -> int:
    """How many nodes `job` could start on at once without those in `avoided`: its own, and those of its partitions on
    which nothing runs."""
    without = {*avoided, *job.excluded_nodes}
    return sum(
        node.name not in without
        and starts_jobs(node.state, bool(job.reservation))
        and (node.name in job.nodes or "IDLE" in node_words(node.state))
        for node in known
        if may_be_for(job, node)
    )


def may_be_for(job: SlurmJob, node: SlurmNode) -> bool:
    """Whether a node is in a partition of the job, as far as Slurm tells partitions."""
    partitions = set(job.partition.split(",")) - {""}
    return not partitions or not node.partitions or not partitions.isdisjoint(node.partitions)


def _count(
    known: Sequence[SlurmNode], partitions: set[str] | None, avoided: set[str], enough: int, in_maintenance: bool
) -> tuple[int, int]:
    """How many nodes there are in the partitions, and how many of them could start it and are not avoided; not counted
    any further than `enough` of these: a cluster has ten thousand nodes, and a storm asks thousands of times."""
    members = left = 0
    for node in known:
        if partitions is not None and partitions.isdisjoint(node.partitions):
            continue
        members += 1
        left += node.name not in avoided and starts_jobs(node.state, in_maintenance)
        if left >= enough:
            break
    return members, left


class Suspects(StrEnum):
    """What restarts do about suspect nodes."""

    IGNORE = "ignore"
    PREFER = "prefer"  # Avoid them where enough others are free now.
    EXCLUDE = "exclude"  # Avoid them where enough others are there at all: the job may wait for these.


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
    anyway. `known`: all nodes of the cluster. `most`: nodes that the job may be kept from altogether. Only nodes of the
    job's partitions are meant, and never so many that it could not start."""
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


_ANY_JOB = re.compile(r"\d+(?:_\d+|_\*)?")


def jobs_behind(job: SlurmJob, jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
    """Jobs of the same owner that wait for `job`: later elements of its array, and those whose --dependency
    names it (or `singleton` under the same name). Those that run already come first."""
    found = [
        other
        for other in jobs
        if other.uid == job.uid
        and other.job_id != job.job_id
        and other.state in COMES
        and ((job.array_job_id and job.array_job_id == other.array_job_id) or _depends(job, other))
    ]
    return tuple(sorted(found, key=lambda other: (other.state in WAITING, other.job_id)))


def freed_by(job: SlurmJob, jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
    """Jobs that wait for the end of `job`, and are not held: Slurm forgets their dependency when it ends, although it
    is requeued a moment later. One that waits for all elements of its array waits on while others are there."""
    behind = [other for other in jobs_behind(job, jobs) if other.state in WAITING and not other.held]
    others = any(each.array_job_id == job.array_job_id and each.job_id != job.job_id for each in behind)
    alone = job.array_job_id == "" or not others
    return tuple(each for each in behind if _depends(job, each, whole_array=alone))


def _depends(job: SlurmJob, other: SlurmJob, *, whole_array: bool = True) -> bool:
    if "singleton" in other.dependency and other.name == job.name:
        return True
    names = {job.job_id, f"{job.array_job_id}_*" if job.array_job_id and whole_array else job.job_id}
    return bool(names & set(_ANY_JOB.findall(other.dependency)))


def broken_under(
    job: SlurmJob, incidents: Sequence[Incident], jobs: Collection[SlurmJob]
) -> tuple[tuple[str, str], ...]:
    """(node, sentence) of each place where the hardware is known to have broken under a job, whatever became of the job
    by it. A dead rank or a hang after it are the consequence: a restart on the same card would meet it again. A fault
    of a GPU that names no job counts only where the job has the node for itself (of `jobs` some have ended: Slurm lists
    them for minutes)."""
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
    """(node, sentence) for each of `nodes` whose own look at a shared filesystem does not return, while more of the
    others reach it than do not. `every`: all nodes there are, asked for only where one of these is in trouble. A user's
    child counts for no one, nor does a disk of the node's own: it is as lost to the next job there, but no other node
    can tell."""
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
