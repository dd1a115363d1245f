"""Nodes of a job whose hardware is known to be broken: a restart avoids them, whatever the job died of. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slurm_watchdog.model.incidents import HARDWARE_FAULTS, Incident, IncidentKind, IncidentState
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
