"""All that one user can do to the policy, beside the job of another."""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.controller.policy.by_user import (
    crowd_of,
    in_trouble,
)
from slurm_watchdog.controller.policy.guards import PolicyInput
from slurm_watchdog.model.actions import Action, Decision, Fence, Verdict
from slurm_watchdog.model.incidents import Incident, IncidentKind
from slurm_watchdog.model.slurm import SlurmJob
from tests.builders.policy_inputs import INCIDENT, SITUATION
from tests.builders.views import slurm_job

MALLORY, VICTIM = 1500, 1501
JOB = slurm_job(job_id="7", uid=VICTIM)
MANY = {str(n): slurm_job(job_id=str(n), uid=MALLORY) for n in range(100, 150)}
OWNERS = {"7": VICTIM} | {job_id: job.uid for job_id, job in MANY.items()}


def incident(job_id: str, kind: IncidentKind = IncidentKind.COLLECTIVE_HANG) -> Incident:
    return replace(INCIDENT, id=f"i{job_id}", kind=kind, subject=f"job:{job_id}", job_ids=(job_id,))


def done(job_id: str, uid: int | None, ago_s: float = 60.0) -> Decision:
    return Decision(
        id=f"d{job_id}", incident_id=f"i{job_id}", action=Action.GRACEFUL_RESTART, verdict=Verdict.ALLOWED, by="x", reason="x",
        decided_at=SITUATION.now_wall - ago_s, fence=Fence(job_id=job_id, restarts=0, start_at=None), uid=uid,
    )  # fmt: skip


def world(job: SlurmJob, recent: tuple[Decision, ...] = (), running: int = 100) -> PolicyInput:
    """How the victim's cluster looks while Mallory does what he can: fifty jobs in the same trouble, all at once."""
    trouble = in_trouble([INCIDENT, *map(incident, MANY)], OWNERS.get)
    crowd = crowd_of(trouble, INCIDENT.kind, job.uid)
    return replace(
        SITUATION, job=job, recent=recent, running_jobs=running, users_running=2, users_in_trouble=crowd.users,
        jobs_in_trouble=crowd.own, mounts_stalled=(),
    )  # fmt: skip


BUSY_MALLORY = tuple(done(job_id, MALLORY) for job_id in MANY)
