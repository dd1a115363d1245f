"""Signals to a job by way of Slurm. A signal is sent once: what became of it is seen in what the job does."""

from __future__ import annotations

from slurm_watchdog.model.actions import Fence, OperationOutcome, Outcome
from slurm_watchdog.slurm.client import SignalTo, SlurmClient, SlurmRefused, SlurmUnavailable

TARGETS: dict[str, tuple[SignalTo, str]] = {
    "steps": (SignalTo.STEPS, "its tasks"),
    "batch": (SignalTo.BATCH, "its batch shell"),
    "all": (SignalTo.FULL, "its batch shell and all tasks"),
}
"""The configuration's word -> Slurm's, and how people call it."""


async def send(client: SlurmClient, fence: Fence, signal: str, to: str) -> Outcome:
    """Sends `signal` (USR1, TERM) to the run of `fence`, and no other. `skipped`: it is sure that nothing was sent."""
    target, receivers = TARGETS[to]
    try:
        job = await client.read_job(fence.job_id)
    except (SlurmUnavailable, SlurmRefused) as error:
        return OperationOutcome.SKIPPED, f"nothing was sent: {error}"
    if job is None or job.restarts != fence.restarts or job.state != "RUNNING":
        return OperationOutcome.SKIPPED, "nothing was sent: the run that the decision was about does not run"
    try:
        await client.send_signal(fence.job_id, signal, target)
    except SlurmRefused as error:
        return (OperationOutcome.FAILED if error.terminal else OperationOutcome.SKIPPED), f"nothing was sent: {error}"
    except SlurmUnavailable as error:
        return OperationOutcome.UNKNOWN, f"it may have been sent: {error}"
    return OperationOutcome.DONE, f"SIG{signal} sent to {receivers}"
