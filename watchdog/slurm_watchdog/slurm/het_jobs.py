"""Merges the components of a heterogeneous job into one job, the first component's. Pure.

They start and end together, one srun may run over all of them, and every rank has the first one's id as
SLURM_JOB_ID: to judge them one by one would tear one training apart, and one hang would be two incidents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import may_hold_nodes


def merge_components(jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
    """The jobs with each heterogeneous one folded into its first component. One whose first component is not
    listed stays as it is."""
    all_jobs = tuple(jobs)
    groups: dict[str, list[SlurmJob]] = {}
    for job in all_jobs:
        if job.het_job_id:
            groups.setdefault(job.het_job_id, []).append(job)
    if not groups:
        return all_jobs
    whole: dict[str, SlurmJob] = {}
    absorbed: set[str] = set()
    for group in groups.values():
        leader = next((job for job in group if job.het_offset == 0), None)
        if leader is not None:
            others = sorted((job for job in group if job is not leader), key=lambda job: job.het_offset or 0)
            whole[leader.job_id] = _merged(leader, others)
            absorbed |= {job.job_id for job in others}
    return tuple(whole.get(job.job_id, job) for job in all_jobs if job.job_id not in absorbed)


def _merged(leader: SlurmJob, others: Sequence[SlurmJob]) -> SlurmJob:
    parts = (leader, *others)
    nodes = dict.fromkeys(node for job in parts if may_hold_nodes(job.state) for node in job.nodes)
    counts = [job.node_count for job in parts]
    return replace(
        leader,
        state=_state(leader, others),
        nodes=tuple(nodes) or leader.nodes,
        required_nodes=tuple(dict.fromkeys(node for job in parts for node in job.required_nodes)),
        node_count=None if None in counts else sum(count or 0 for count in counts),
        component_ids=tuple(job.raw_id or job.job_id for job in others),
        unreadable=tuple(sorted({name for job in parts for name in job.unreadable})),
    )


def _state(leader: SlurmJob, others: Sequence[SlurmJob]) -> str:
    """The first component's, which has the batch script. After its end the job is ending as long as another
    one holds nodes."""
    if may_hold_nodes(leader.state) or not any(may_hold_nodes(job.state) for job in others):
        return leader.state
    return "COMPLETING"
