"""What our `srun` has to know of the present start, and the files that say on which node each task runs
(SLURM_HOSTFILE, `--nodefile`, `--nodelist=FILE`), for the nodes of a start. Pure.

Standard library only: it is read at every call of srun in the command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LOOK_MARK = "slurm-watchdog-look "  # Begins the line that `look` prints on each node: a site's prolog may print, too.

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Plan(NamedTuple):
    """Written by the supervisor for each start, read by its `srun`."""

    job_id: str
    srun: str  # Path of the real one.
    directory: str  # Of our own srun: taken out of PATH behind it.
    nodes: tuple[str, ...]  # Of this start, in the order of the allocation.
    left_out: tuple[str, ...]  # Nodes of the allocation that this start does not use: avoided ones, and spares.
    tasks: int  # Of the command on `nodes`; 0: the allocation has no number of tasks.
    all_tasks: int  # On all nodes of the allocation, as the script knows it.
    overlap: bool  # An older step is still there.
    gpus: int = 0  # Of `nodes`; 0: not known.
    all_gpus: int = 0  # Of all nodes of the allocation, as the script knows it.


def to_text(plan: Plan) -> str:
    """One JSON document."""
    return json.dumps(plan._asdict())


def from_text(text: str) -> Plan:
    """The plan in a file. Raises ValueError and TypeError if it is none."""
    fields = json.loads(text)
    return Plan(**{**fields, "nodes": tuple(fields["nodes"]), "left_out": tuple(fields["left_out"])})


def file_named(given: Mapping[str, str | None], environ: Mapping[str, str]) -> str:
    """By which file srun with these options places its tasks; empty: by none. As Slurm's src/srun/opt.c (later
    src/common/slurm_opt.c) has it: the variable counts where no list is given, whatever the distribution."""
    listed = given.get("nodefile") or given.get("nodelist") or ""
    if not listed:
        return environ.get("SLURM_HOSTFILE", "")
    return listed if given.get("nodefile") or "/" in listed else ""


def hosts_in(text: str) -> list[str] | None:
    """One node a line, in the order of the tasks; None: it is written in another way (`n[1-4]`, `n1*8`)."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    hosts = [line for line in lines if line]
    return hosts if hosts and all(_HOST.fullmatch(host) for host in hosts) else None


def moved(hosts: Sequence[str], plan: Plan) -> list[str]:
    """The same on the nodes of this start: for each node that is left out one that has no tasks yet. Where there are
    too few of these, as in a list of the whole job with its spares, the others have no tasks."""
    gone = [node for node in dict.fromkeys(hosts) if node in plan.left_out]
    instead = dict(zip(gone, [node for node in plan.nodes if node not in hosts], strict=False))
    return [instead.get(host, host) for host in hosts if host in instead or host not in gone]
