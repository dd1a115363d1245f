"""Whether a job could still be placed if it had to avoid some nodes. Pure.

An exclusion that leaves too few nodes makes a job wait for ever, which is worse than the node it avoids.
"""

from __future__ import annotations

from collections.abc import Sequence

from watchdog.model import SlurmJob, SlurmNode

OUT_OF_SERVICE = (
    "DOWN", "DRAIN", "FAIL", "MAINT", "NOT_RESPONDING", "NO_RESPOND", "POWER_DOWN", "POWERED_DOWN", "POWERING_DOWN", "FUTURE",
    "UNKNOWN", "INVAL", "REBOOT",
)  # fmt: skip
"""Parts of Slurm's state of a node that starts no job now. A node that is switched off to save power can be switched on, but nobody
knows whether it comes: it is not counted."""


def is_up(node: SlurmNode) -> bool:
    """Whether Slurm would start jobs on the node, when there is room."""
    state = node.state.upper()
    return not any(word in state for word in OUT_OF_SERVICE) and not state.endswith("*")


def objection_to_excluding(job: SlurmJob, nodes: Sequence[str], known: Sequence[SlurmNode]) -> str | None:
    """Why `nodes` must not be added to the exclusions of `job`, a sentence; None if it can still run without them.

    `known` are all nodes of the cluster. A job that needs certain nodes (--nodelist) is never kept from one of those. Which nodes
    its constraints, its size and its reservation leave is not known here: nodes that it has run on are sure to fit, others of its
    partition are counted in their favour.
    """
    names = ", ".join(nodes)
    required = [node for node in nodes if node in job.required_nodes]
    if required:
        return f"{', '.join(required)} is not excluded: the job was submitted for it (--nodelist)"
    wanted = job.node_count or len(job.nodes)
    partitions = set(job.partition.split(",")) - {""}
    members = [node for node in known if partitions & set(node.partitions)]
    if not members:  # a Slurm that does not tell partitions
        members = list(known)
    avoided = {*nodes, *job.excluded_nodes}
    left = [node for node in members if is_up(node) and node.name not in avoided]
    if members and len(left) < wanted:
        return f"{names} is not excluded: the job needs {wanted} nodes, and only {len(left)} would be left that are up"
    return None
