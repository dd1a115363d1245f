"""Whether a node on which the old run of a requeued job does not end may be set DOWN, as far as Slurm's listing says. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from watchdog.model.slurm import SlurmJob, SlurmNode
from watchdog.model.slurm_states import is_drained, is_lost, may_hold_nodes

GAVE_UP = "Kill task failed"
"""How slurmd's reason for the drain begins when a step's processes outlived UnkillableStepTimeout (slurmd, stepmgr: 22.05 to 26.05)."""


def why_not(job: SlurmJob, node: SlurmNode, jobs: Sequence[SlurmJob], partial: str) -> str:
    """Why a node on which the old run of `job` does not end must not be set DOWN, as far as Slurm's listing goes; empty if it may."""
    if is_lost(node.state):
        return f"Slurm has it as {node.state} already"
    if not is_drained(node.state) or not node.reason.startswith(GAVE_UP):
        return "Slurm has not given up on it yet: it drains the node with `Kill task failed` after UnkillableStepTimeout"
    named = {job.process_id, *job.component_ids}
    if "JobId=" in node.reason and not any(
        f"JobId={name} " in f"{node.reason} ".replace(")", " ") for name in named
    ):
        return f"Slurm drained it for another job ({node.reason})"
    if partial:
        return f"whether other jobs run there is not known: {partial}"
    for other in jobs:
        if other.job_id == job.job_id or not may_hold_nodes(other.state):
            continue
        if node.name in other.nodes or "nodes" in other.unreadable:
            return f"job {other.job_id} runs there, too, or may"
    return ""
