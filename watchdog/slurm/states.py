"""Every word that Slurm has for the state of a job, and what became of a requeue. Pure.

squeue shows one word: a flag (COMPLETING, SIGNALING, REQUEUE_HOLD, …) wins over the state below it. A word that is not in
this table is no error: nothing is done to such a job, for it is neither running nor waiting nor finished.

Requeueing, as observed: `scontrol requeuehold J` on a running job gives at once COMPLETING, reason `job requeued in held
state`, priority 0, restarts + 1; when the processes are gone PENDING with the same reason. Exclusions may be
set and the job released in both. Then PENDING with reason BeginTime until the credential's lifetime is over.
`requeuehold Incomplete J` touches only CONFIGURING, RUNNING, STOPPED and SUSPENDED jobs, decided by
slurmctld under its lock: a job that has ended, is completing or is pending stays as it is, *and the command says nothing and
exits with 0*. What became of it has to be read afterwards: `judge_requeue_hold`.
"""

from __future__ import annotations

from enum import StrEnum

from watchdog.model.slurm import SlurmJob
from watchdog.slurm.client import Refusal


class Stage(StrEnum):
    """Where a job is in its life."""

    WAITS = "waits"
    """It will run (again), held or not."""
    STARTS = "starts"
    """It has nodes, which are made ready."""
    RUNS = "runs"
    """It has nodes and processes, stopped ones too."""
    ENDS = "ends"
    """It still has nodes, and goes."""
    OVER = "over"


STAGES: dict[str, Stage] = {
    "PENDING": Stage.WAITS,
    "REQUEUED": Stage.WAITS,
    "REQUEUE_FED": Stage.WAITS,
    "REQUEUE_HOLD": Stage.WAITS,
    "SPECIAL_EXIT": Stage.WAITS,
    "RESV_DEL_HOLD": Stage.WAITS,
    "EXPEDITING": Stage.WAITS,
    "CONFIGURING": Stage.STARTS,
    "POWER_UP_NODE": Stage.STARTS,
    "RUNNING": Stage.RUNS,
    "SUSPENDED": Stage.RUNS,
    "STOPPED": Stage.RUNS,
    "SIGNALING": Stage.RUNS,
    "RESIZING": Stage.RUNS,
    "UPDATE_DB": Stage.RUNS,
    "STAGE_OUT": Stage.RUNS,
    "COMPLETING": Stage.ENDS,
    "BOOT_FAIL": Stage.OVER,
    "CANCELLED": Stage.OVER,
    "COMPLETED": Stage.OVER,
    "DEADLINE": Stage.OVER,
    "FAILED": Stage.OVER,
    "LAUNCH_FAILED": Stage.OVER,
    "NODE_FAIL": Stage.OVER,
    "OUT_OF_MEMORY": Stage.OVER,
    "PREEMPTED": Stage.OVER,
    "RECONFIG_FAIL": Stage.OVER,
    "REVOKED": Stage.OVER,
    "TIMEOUT": Stage.OVER,
}
"""The states and flags of squeue's and sacct's manual pages, releases 22.05 to 26.05."""

FINISHED = frozenset(state for state, stage in STAGES.items() if stage is Stage.OVER)
WAITING = frozenset(state for state, stage in STAGES.items() if stage is Stage.WAITS) | {"COMPLETING"}
"""States in which a job may be held. COMPLETING: the run before is still going away."""
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States that say themselves that the job is held."""
SIGNALLED = frozenset(state for state, stage in STAGES.items() if stage is Stage.RUNS)
"""States of a job that has processes which a signal can reach."""
REQUEUED_HELD = "job requeued in held state"


def is_held(state: str, reason: str, priority: int | None) -> bool:
    """Whether the job waits for somebody to release it. Slurm gives held jobs the priority 0."""
    if state in HELD:
        return True
    return state in WAITING and (reason == REQUEUED_HELD or reason.startswith("JobHeld") or priority == 0)


Verdict = tuple[bool | None, str, Refusal]
"""Whether it was done (None: that can't be said yet), why, and what kind of a no it is if it was not."""


def judge_requeue_hold(job: SlurmJob | None) -> Verdict:
    """What `requeuehold Incomplete` did, from the job as read afterwards."""
    if job is not None and job.held and job.state in WAITING:
        return True, f"{job.state}, {job.reason}", Refusal.OTHER
    return _left_alone(job)


def judge_requeue(before: SlurmJob | None, after: SlurmJob | None) -> Verdict:
    """What `requeue` did, from the job as read before and afterwards. The restart count rises at once."""
    if before is not None and after is not None and after.restarts > before.restarts:
        return True, f"{after.state}, {after.reason}", Refusal.OTHER
    return _left_alone(after)


def _left_alone(job: SlurmJob | None) -> Verdict:
    if job is None:
        return False, "Slurm no longer knows the job", Refusal.NO_SUCH_JOB
    if job.state in FINISHED:
        return False, f"the job has already finished ({job.state})", Refusal.FINISHED
    if job.state == "COMPLETING":
        return False, "the job is already ending by itself (COMPLETING)", Refusal.FINISHED
    if job.state in WAITING:
        return False, f"the job is not running ({job.state}, {job.reason})", Refusal.NOT_RUNNING
    return None, f"Slurm accepted the requeue, yet the job is still {job.state}", Refusal.OTHER
