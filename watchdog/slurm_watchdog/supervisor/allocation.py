"""What a batch script's environment says about its job. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.srun_options import gpu_number
from slurm_watchdog.slurm.node_names import MAX_NODES, expand_nodes

_REPEATED = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


class Allocation(Struct):
    """The job that this process is in."""

    job_id: str
    restarts: int = 0
    nodes: tuple[str, ...]  # In Slurm's order, which is that of the ranks.
    batch_host: str = ""  # Where the batch script runs; empty in an allocation's shell, which may be anywhere.
    tasks: tuple[int, ...] = ()  # Of each node (SLURM_TASKS_PER_NODE); empty: not known.
    cpus: tuple[int, ...] = ()  # Of each node (SLURM_JOB_CPUS_PER_NODE); empty: not known.
    gpus: int = 0  # Of all nodes together; 0: none, or not known.
    end_at: float | None = None  # When its time is over, since the epoch; None: not known.


FIRST_OF_SLURMS_OWN = 0xFFFFFFF0
"""Step ids from here on are the batch script's and the like (slurm.h: SLURM_MAX_NORMAL_STEP_ID)."""


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch script, or an allocation's shell; a task of a step is none, for there are many."""
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < FIRST_OF_SLURMS_OWN:
        return False
    return environ.get("SLURM_JOB_ID", "").isdecimal() and bool(environ.get("SLURM_JOB_NODELIST"))


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """The job of this environment. Raises ValueError with a sentence where `run` cannot supervise it."""
    if environ.get("SLURM_HET_SIZE") or environ.get("SLURM_PACK_SIZE"):
        raise ValueError(
            "this is a heterogeneous job: `run` starts a command on the nodes of one component, and cannot tell "
            "which; start the command without `run`, the watchdog requeues it as before"
        )
    if not is_in_job(environ):
        raise ValueError("SLURM_JOB_ID and SLURM_JOB_NODELIST are not set: this is not a batch script")
    nodes = expand_nodes(environ["SLURM_JOB_NODELIST"])
    if not nodes:
        raise ValueError("SLURM_JOB_NODELIST names no node")
    end, restarts = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_RESTART_COUNT", "")
    tasks = _of_each(environ.get("SLURM_TASKS_PER_NODE", ""), len(nodes))
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        restarts=int(restarts) if restarts.isdecimal() else 0,
        nodes=nodes,
        batch_host=environ.get("SLURMD_NODENAME", ""),
        tasks=tasks,
        cpus=_of_each(environ.get("SLURM_JOB_CPUS_PER_NODE", ""), len(nodes)),
        gpus=_all_gpus(environ, len(nodes), alike="SLURM_GPUS_PER_TASK" not in environ or len(set(tasks)) == 1),
        end_at=float(end) if end.isdecimal() else None,
    )


def node_count(wanted_nodes: int | None, spares: int, allocation: Allocation) -> int:
    """Nodes of a start. Raises ValueError with a sentence."""
    have = len(allocation.nodes)
    count = have - spares if wanted_nodes is None else wanted_nodes
    if count < 1 or count + spares > have:
        asked = f"--nodes={wanted_nodes} " if wanted_nodes is not None else ""
        raise ValueError(f"{asked}--spares={spares} takes more than the {have} nodes of this job: sbatch --nodes=N+S")
    return count


def _all_gpus(environ: Mapping[str, str], nodes: int, *, alike: bool) -> int:
    """By --gpus, --gpus-per-node, or what this node has where all nodes are `alike` (sbatch(1), OUTPUT ENVIRONMENT)."""
    if "SLURM_GPUS" in environ:
        return gpu_number(environ["SLURM_GPUS"])
    each = environ.get("SLURM_GPUS_PER_NODE") or (environ.get("SLURM_GPUS_ON_NODE", "") if alike else "")
    return gpu_number(each) * nodes


def _of_each(text: str, count: int) -> tuple[int, ...]:
    """`2(x3),1` is 2, 2, 2, 1; nothing where it is not a number for each of `count` nodes."""
    found: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None or int(match[2] or 1) > MAX_NODES:
            return ()
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found) if len(found) == count else ()


def repeated(numbers: tuple[int, ...]) -> str:
    """2, 2, 2, 1 as Slurm writes it: `2(x3),1`."""
    counts = [(number, len(list(group))) for number, group in groupby(numbers)]
    return ",".join(f"{number}(x{count})" if count > 1 else str(number) for number, count in counts)
