"""Whether a node on which the old run of a requeued job does not end may be set DOWN, as far as Slurm's
listing says. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.model.observations import BY_SLURM, Process
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import is_drained, is_lost, may_hold_nodes

GAVE_UP = "Kill task failed"
"""How slurmd's reason for the drain begins when a step's processes outlived UnkillableStepTimeout (slurmd,
stepmgr: 22.05 to 26.05)."""


def is_unkillable(processes: Sequence[Process], for_s: float) -> bool:
    """Whether the newest report of a node shows that a process of the job, in Slurm's own control group, has
    been in state D for `for_s`."""
    return any(
        each.member_by == BY_SLURM and each.state == "D" and (each.state_age_s or 0.0) >= for_s for each in processes
    )


def why_not(job: SlurmJob, node: SlurmNode, jobs: Sequence[SlurmJob], partial: str, *, unkillable: bool = False) -> str:
    """Why a node on which the old run of `job` does not end must not be set DOWN; empty if it may.

    Either Slurm itself has given the node up, or no one has drained it and its agent shows a process that
    cannot be killed (`unkillable`): Slurm 26.05 was seen to keep the job COMPLETING beyond
    UnkillableStepTimeout without draining the node.
    """
    if is_lost(node.state):
        return f"Slurm has it as {node.state} already"
    if not is_drained(node.state):
        if not unkillable:
            return (
                "neither has Slurm given up on it (it drains the node with `Kill task failed` after "
                "UnkillableStepTimeout) nor "
                "does its agent report a process of the job that has been in state D for long enough"
            )
    elif not node.reason.startswith(GAVE_UP):
        return f"it is drained for another reason ({node.reason or 'none given'})"
    named = {job.process_id, *job.component_ids}
    if "JobId=" in node.reason and not any(f"JobId={name} " in f"{node.reason} ".replace(")", " ") for name in named):
        return f"Slurm drained it for another job ({node.reason})"
    if partial:
        return f"whether other jobs run there is not known: {partial}"
    for other in jobs:
        if other.job_id == job.job_id or not may_hold_nodes(other.state):
            continue
        if node.name in other.nodes or "nodes" in other.unreadable:
            return f"job {other.job_id} runs there, too, or may"
    return ""
