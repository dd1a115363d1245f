"""Which nodes are to be tested, and in which partition. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import HOLDS_NODES, USED, is_drained, node_words, starts_jobs

DRAIN_MARK = "slurm-watchdog:"
"""Begins the reason of every drain of ours (controller/actions/tools.py)."""

NOT_OURS = "it is not drained or reserved by slurm-watchdog, or is in use"


class Selection(Struct, frozen=True, kw_only=True):
    """Given on the command line; what is not given does not narrow."""

    names: tuple[str, ...] = ()
    idle: bool = False
    partition: str = ""
    job: str = ""
    drained_by_us: bool = False


class Chosen(Struct, frozen=True, kw_only=True):
    """What it comes to."""

    nodes: tuple[SlurmNode, ...] = ()
    left: Mapping[str, str] = {}
    """Node to why it is not tested."""
    after: str = ""
    """The job that has to end first."""


def choose_nodes(asked: Selection, view: SlurmView, reserved: Collection[str] = ()) -> Chosen:
    """The nodes, in Slurm's order. `reserved`: those that slurm-watchdog keeps in reservations, as good as drained by
    it. Raises ValueError with a sentence where there is nothing to be tested."""
    known = {node.name: node for node in view.nodes}
    names, after = list(asked.names), ""
    if asked.job:
        job = next((each for each in view.jobs if each.job_id == asked.job), None)
        if job is None or not job.nodes:
            raise ValueError(f"Slurm knows no nodes of job {asked.job}: it has not started, or is forgotten")
        names += job.nodes
        after = asked.job if job.state in HOLDS_NODES else ""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"Slurm knows no node {', '.join(unknown)}")
    nodes = [known[name] for name in dict.fromkeys(names)] if names else list(view.nodes)
    if asked.partition:
        nodes = [node for node in nodes if asked.partition in node.partitions]
    left: dict[str, str] = {}
    chosen: list[SlurmNode] = []
    for node in nodes:
        reason = _why_not(node, asked, named=bool(names), reserved=node.name in reserved)
        if reason is None:
            chosen.append(node)
        elif reason and names:
            left[node.name] = reason
    if asked.drained_by_us and not any(is_drained(node.state) or node.name in reserved for node in chosen):
        left |= {node.name: NOT_OURS for node in chosen}
        chosen = []
    if not chosen and not left:
        raise ValueError("No node fits: see sinfo")
    return Chosen(nodes=tuple(chosen), left=left, after=after)


def _why_not(node: SlurmNode, asked: Selection, *, named: bool, reserved: bool) -> str | None:
    """Why it is not tested; None: it is. `named`: nodes were named, so that idle ones are there to compare with."""
    ours = node.reason.startswith(DRAIN_MARK) if is_drained(node.state) else reserved
    is_idle = starts_jobs(node.state) and "IDLE" in node_words(node.state)
    if asked.drained_by_us:
        fits = (ours and not node_words(node.state) & USED) or (named and is_idle)
        return None if fits else NOT_OURS
    if not starts_jobs(node.state):
        return f"Slurm starts no job there: {node.state.lower()}{f' ({node.reason})' if node.reason else ''}"
    if asked.idle and not is_idle:
        return "it is not idle"
    return None


def partition_of(nodes: Sequence[SlurmNode], wanted: str) -> str:
    """The one in which a job on all of them is submitted: `wanted`, else one that they share, else none."""
    if wanted:
        return wanted
    shared = set(nodes[0].partitions).intersection(*(node.partitions for node in nodes))
    return min(shared, default="")
