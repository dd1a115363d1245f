"""Held jobs, and whether Slurm carried out a requeue. Pure.

The table of states is `slurm_watchdog.model.slurm_states`.

Requeueing, as observed: `scontrol requeuehold J` on a running job gives at once COMPLETING, reason `job
requeued in held state`, priority 0, restarts + 1; when the processes are gone PENDING with the same reason.
Exclusions may be set and the job released in both. Then PENDING with reason BeginTime until the credential's
lifetime is over. `requeuehold Incomplete J` touches only CONFIGURING, RUNNING, STOPPED and SUSPENDED jobs,
decided by slurmctld under its lock: a job that has ended, is completing or is pending stays as it is, *and
the command says nothing and exits with 0*. What became of it has to be read afterwards: `requeue_hold_verdict`.
"""

from __future__ import annotations

from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import HELD, OVER, REQUEUED
from slurm_watchdog.slurm.client import Refusal

REQUEUED_HELD = "job requeued in held state"
UNREADABLE = "UNREADABLE"
"""In place of a state that cannot be read: no word of Slurm's, so nothing is done to such a job and nothing
concluded from it."""


def is_held(state: str, reason: str, priority: int | None) -> bool:
    """Whether the job is held until a user releases it. Slurm gives held jobs the priority 0.

    A job that Slurm has held after a failure keeps REQUEUE_HOLD until it starts, also once it is released (22.05 to
    25.11): there the priority says it.
    """
    if state in HELD:
        return state != "REQUEUE_HOLD" or not priority
    return state in REQUEUED and (reason == REQUEUED_HELD or reason.startswith("JobHeld") or priority == 0)


Verdict = tuple[bool | None, str, Refusal]
"""Whether it was done (None: that can't be said yet), why, and what kind of a no it is if it was not."""


def requeue_hold_verdict(job: SlurmJob | None) -> Verdict:
    """What `requeuehold Incomplete` did, from the job as read afterwards."""
    if job is not None and job.held and job.state in REQUEUED:
        return True, f"{job.state}, {job.reason}", Refusal.OTHER
    if job is None:
        return False, "Slurm no longer knows the job", Refusal.NO_SUCH_JOB
    if job.state in OVER:
        return False, f"the job has already finished ({job.state})", Refusal.FINISHED
    if job.state == "COMPLETING":
        return False, "the job is already ending by itself (COMPLETING)", Refusal.FINISHED
    if job.state in REQUEUED:
        return False, f"the job is not running ({job.state}, {job.reason})", Refusal.NOT_RUNNING
    return None, f"Slurm accepted the requeue, yet the job is still {job.state}", Refusal.OTHER
