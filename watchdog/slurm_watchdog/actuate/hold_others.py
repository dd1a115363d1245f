"""The other elements of a job's array: held while a kill switch is there that they would see, then released.

Slurm starts the next element of an array with `%1` within a second of the end of the one before, and no file is
removed from a filesystem as fast for certain; an element that is held does not start.
"""

from __future__ import annotations

from contextlib import suppress

from slurm_watchdog.actuate.answered import answered
from slurm_watchdog.model.actions import Decision, OperationOutcome, Outcome
from slurm_watchdog.model.slurm import SlurmJob, elements_of
from slurm_watchdog.model.slurm_states import HOLDS_NODES, WAITING
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused


@answered
async def hold_others(client: SlurmClient, decision: Decision) -> Outcome:
    """Done when Slurm lists no element that could start, nor one that has started in between."""
    for name in decision.hold_first:
        with suppress(SlurmRefused):  # one that has ended or started: what Slurm lists afterwards counts
            await client.hold(name)
    others, partial = await _others(client, decision)
    if partial:
        return OperationOutcome.UNKNOWN, f"Slurm does not list all jobs: {partial}"
    started = [job.job_id for job in others if job.state in HOLDS_NODES and job.job_id in _named(decision)]
    if started:
        return OperationOutcome.FAILED, f"{started[0]} has started, and would see the kill switch"
    free = [job.job_id for job in others if job.state in WAITING and not job.held]
    if free:
        return OperationOutcome.UNKNOWN, f"Slurm does not show {', '.join(free[:5])} held"
    return OperationOutcome.DONE, f"held: {', '.join(decision.hold_first)}"


@answered
async def release_others(client: SlurmClient, decision: Decision) -> Outcome:
    """Done when none of those that were held is held any more; one that has ended since is not missed."""
    for job in await _held(client, decision):
        await client.release(job.job_id)
    still = [job.job_id for job in await _held(client, decision)]
    if still:
        return OperationOutcome.UNKNOWN, f"Slurm still holds {', '.join(still[:5])}"
    return OperationOutcome.DONE, f"released: {', '.join(decision.hold_first)}"


async def _held(client: SlurmClient, decision: Decision) -> list[SlurmJob]:
    """Those of `hold_first` that wait, held."""
    named = _named(decision)
    others = (await _others(client, decision))[0]
    return [
        job for job in others if job.held and job.state in WAITING and not named.isdisjoint(elements_of(job.job_id))
    ]


def _named(decision: Decision) -> frozenset[str]:
    return frozenset[str]().union(*map(elements_of, decision.hold_first))


async def _others(client: SlurmClient, decision: Decision) -> tuple[list[SlurmJob], str]:
    """The elements of the job's array but itself, and why there may be more. Raises what the client raises."""
    assert decision.fence is not None
    view = await client.read_view()
    array = decision.fence.job_id.partition("_")[0]
    return [job for job in view.jobs if job.array_job_id == array and job.job_id != decision.fence.job_id], view.partial
