"""Slurm's levers: requeue held, exclude, release. Each is looked up in Slurm afterwards: an exit code proves
nothing."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.actuate.answered import answered, refusal
from slurm_watchdog.model.actions import Fence, OperationOutcome, Outcome
from slurm_watchdog.model.slurm_states import RESTARTABLE, STARTED
from slurm_watchdog.slurm.client import Refusal, SlurmClient, SlurmRefused, SlurmUnavailable


@answered
async def requeue_hold(client: SlurmClient, fence: Fence, *, only_unfinished: bool) -> Outcome:
    """Puts the run of `fence`, and no other, back into the queue, held.

    The job is read immediately before and after. `only_unfinished` leaves a job alone that has ended in between
    (Slurm then does nothing and says nothing, so only the second look tells), or that somebody has suspended.
    SKIPPED: nothing was sent, so that a requeue that is seen afterwards is somebody else's.
    """
    try:
        before = await client.read_job(fence.job_id)
    except SlurmUnavailable as error:
        return OperationOutcome.SKIPPED, f"nothing was sent: {error}"
    if before is not None and before.unsure:
        return OperationOutcome.SKIPPED, f"nothing was sent: {before.unsure}"
    if before is None or before.restarts != fence.restarts or before.start_at != fence.start_at:
        return OperationOutcome.SKIPPED, "nothing was sent: the job is not the run that the decision was about"
    if only_unfinished and before.state in STARTED - RESTARTABLE:
        return OperationOutcome.SKIPPED, f"nothing was sent: the job has become {before.state}"
    if not only_unfinished and before.state == "CANCELLED":
        return OperationOutcome.FAILED, "the job was cancelled in the meantime: it is not run again"
    try:
        await client.requeue_hold(fence.job_id, only_unfinished=only_unfinished)
        after = await client.read_job(fence.job_id)
    except SlurmRefused as error:
        return await _ended_meanwhile(client, fence, error)
    if after is not None and after.restarts == fence.restarts:
        return OperationOutcome.UNKNOWN, f"Slurm did not requeue it: the job is {after.state}"
    return OperationOutcome.DONE, "requeued and held"


async def _ended_meanwhile(client: SlurmClient, fence: Fence, said: SlurmRefused) -> Outcome:
    """A run that ended between the look and the request is no refusal for good: the ladder looks again."""
    try:
        job = await client.read_job(fence.job_id)
    except (SlurmUnavailable, SlurmRefused):
        return refusal(said)
    if job is not None and job.state != "RUNNING":
        final = said.kind in (Refusal.NO_PERMISSION, Refusal.NOT_BATCH, Refusal.NOT_REQUEUEABLE)
        outcome = OperationOutcome.FAILED if final else OperationOutcome.UNKNOWN
        return outcome, f"the job had become {job.state}: {said}"
    return refusal(said)


@answered
async def exclude(client: SlurmClient, job_id: str, nodes: Sequence[str]) -> Outcome:
    """Gives the pending job its whole new list of excluded nodes (Slurm replaces the old one)."""
    await client.set_excluded_nodes(job_id, nodes)
    after = await client.read_job(job_id)
    missing = set(nodes) - set(after.excluded_nodes if after else ())
    if missing:
        return OperationOutcome.UNKNOWN, f"Slurm does not show {', '.join(sorted(missing))} among the excluded nodes"
    return OperationOutcome.DONE, f"excluded: {', '.join(nodes)}"


@answered
async def release(client: SlurmClient, job_id: str) -> Outcome:
    """Lets the held job run again."""
    await client.release(job_id)
    after = await client.read_job(job_id)
    if after is not None and after.held:
        return OperationOutcome.UNKNOWN, "Slurm still holds the job"
    return OperationOutcome.DONE, "released"
