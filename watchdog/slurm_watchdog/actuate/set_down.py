"""Tells Slurm that a node is down whose processes it cannot end, so that the requeued job that waits for them
starts elsewhere.

Slurm 25.11 and later keep a requeued job COMPLETING as long as a process of its old run is alive, also one in
state D that nothing can end (22.05 and 24.11 let go after UnkillableStepTimeout). With the node DOWN the job
starts within seconds. State=DOWN ends every job on the node: so nothing is sent unless Slurm itself has given
the node up, or its agent shows the process, and Slurm shows no other job there, at this very moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurm_watchdog.actuate.answered import answered
from slurm_watchdog.model.actions import Fence, OperationOutcome, Outcome
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.stuck_node import why_not
from slurm_watchdog.slurm.client import SlurmClient


@answered
async def set_down(
    client: SlurmClient,
    fence: Fence,
    nodes: Sequence[str],
    reason: str,
    note: Callable[[SlurmNode], None],
    unkillable: Callable[[SlurmJob, str], bool],
) -> Outcome:
    """Sets those of `nodes` DOWN that hold up the run after `fence`; `note` gets each as Slurm has it afterwards;
    `unkillable` answers whether a node's agent shows, at this moment, a process of the job that cannot be killed.

    Everything is read again just before; `skipped`: nothing was sent, and nothing is to be sent.
    """
    done: list[str] = []
    for name in nodes:
        view = await client.read_view()
        node = await client.read_node(name)
        job = next((job for job in view.jobs if job.job_id == fence.job_id), None)
        why = objection(job, node, view, fence, unkillable=job is not None and unkillable(job, name))
        if why or node is None:
            outcome = OperationOutcome.DONE if done else OperationOutcome.SKIPPED
            return outcome, f"{name} is left as it is: {why}" + (f"; DOWN: {', '.join(done)}" if done else "")
        await client.set_node_down(name, reason)
        after = await client.read_node(name)
        if after is None or not after.reason.startswith(reason[:40]):
            return OperationOutcome.UNKNOWN, f"Slurm does not show {name} with our reason"
        note(after)
        done.append(name)
    return OperationOutcome.DONE, f"set DOWN: {', '.join(done)}"


def objection(job: SlurmJob | None, node: SlurmNode | None, view: SlurmView, fence: Fence, *, unkillable: bool) -> str:
    """Why the node must not be set DOWN for this job, a sentence; empty if it may."""
    if job is None or job.unsure or node is None:
        return "Slurm does not show the job, or the node, as it has to be known"
    if job.restarts != fence.restarts + 1 or job.state != "COMPLETING" or node.name not in job.nodes:
        return f"it does not hold up the job any more ({job.state})"
    return why_not(job, node, view.jobs, view.partial, unkillable=unkillable)
