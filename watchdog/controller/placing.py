"""Whether a job could still be placed if it had to avoid some nodes. Pure.

An exclusion that leaves too few nodes makes a job wait for ever, which is worse than the node it avoids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from watchdog.model.slurm import SlurmJob, SlurmNode

OUT_OF_SERVICE = (
    "DOWN", "DRAIN", "FAIL", "MAINT", "NOT_RESPONDING", "NO_RESPOND", "POWER_DOWN", "POWERED_DOWN", "POWERING_DOWN", "FUTURE",
    "UNKNOWN", "INVAL", "REBOOT",
)  # fmt: skip
"""Parts of Slurm's state of a node that starts no job now. A node that is switched off to save power can be switched on, but nobody
knows whether it comes: it is not counted."""


def is_up(node: SlurmNode) -> bool:
    """Whether Slurm would start jobs on the node, when there is room."""
    return _starts_jobs(node.state)


@lru_cache(maxsize=256)
def _starts_jobs(said: str) -> bool:
    state = said.upper()
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
    avoided = {*nodes, *job.excluded_nodes}
    members, left = _count(known, partitions, avoided, wanted)
    if not members:  # a Slurm that does not tell partitions
        members, left = _count(known, None, avoided, wanted)
    if members and left < wanted:
        return f"{names} is not excluded: the job needs {wanted} nodes, and only {left} would be left that are up"
    return None


def _count(
    known: Sequence[SlurmNode], partitions: set[str] | None, avoided: set[str], enough: int
) -> tuple[int, int]:
    """How many nodes there are in the partitions, and how many of them are up and not avoided; not counted any further than
    `enough` of these: a cluster has ten thousand nodes, and a storm asks thousands of times."""
    members = left = 0
    for node in known:
        if partitions is not None and partitions.isdisjoint(node.partitions):
            continue
        members += 1
        left += node.name not in avoided and is_up(node)
        if left >= enough:
            break
    return members, left
