"""What one listing of Slurm says, beside the one before: a job that is missing, or a field that cannot be
read, is unknown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from slurm_watchdog.model.node_view import SlurmNodeView
from slurm_watchdog.model.slurm import SlurmJob, SlurmView
from slurm_watchdog.model.slurm_states import OVER, RUNNING, is_away, is_lost

REMEMBERED = ("uid", "nodes", "start_at", "is_batch", "requeueable", "required_nodes")
"""Fields that stay as they were while Slurm's word for them cannot be read: nothing is done to such a job
either way."""


def process_ids(job: SlurmJob) -> tuple[str, ...]:
    """What the job's processes may have as SLURM_JOB_ID: of a heterogeneous job each component's number."""
    return (job.process_id, *job.component_ids)


def jobs_now(before: Mapping[str, SlurmJob], view: SlurmView) -> dict[str, SlurmJob]:
    """The jobs by id: those of the listing and, if it does not show all, those that were not over in the one before."""
    now = {job.job_id: remembered(job, before.get(job.job_id)) for job in view.jobs}
    if not view.partial:
        return now
    missing = {name: job for name, job in before.items() if name not in now and job.state not in OVER}
    return missing | now


def remembered(job: SlurmJob, before: SlurmJob | None) -> SlurmJob:
    """The job, with what could not be read as it was before in the same run."""
    if not job.unreadable or before is None or before.raw_id != job.raw_id:
        return job
    if "restarts" not in job.unreadable and job.restarts != before.restarts:
        return job
    return replace(job, **{name: getattr(before, name) for name in REMEMBERED if name in job.unreadable})


def node_views(view: SlurmView, known: Iterable[SlurmNodeView], now: float) -> tuple[SlurmNodeView, ...]:
    """The nodes of a listing, with what two listings tell: since when a node is back, and in how many it was
    lost. `known`: by the listing before."""
    before = {node.name: node for node in known}
    in_use = {name for job in view.jobs if job.state in RUNNING for name in job.nodes}
    found = []
    for node in view.nodes:
        old, runs_job = before.get(node.name), node.name in in_use
        back_at = old.back_at if old is not None else None
        if old is not None and is_away(old.state, old.runs_job) and not is_away(node.state, runs_job):
            back_at = now
        lost = 1 + (old.lost_listings or 0 if old is not None else 0) if is_lost(node.state) else 0
        found.append(
            SlurmNodeView(
                name=node.name,
                state=node.state,
                reason=node.reason,
                runs_job=runs_job,
                back_at=back_at,
                lost_listings=lost,
            )
        )
    return tuple(found)
