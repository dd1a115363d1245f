"""A file that says on which node each task runs (SLURM_HOSTFILE, `--nodefile`, `--nodelist=FILE`), for the nodes of a
start. Pure; the standard library alone, for it is read at a call of srun."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slurm_watchdog.supervisor.plan import Plan

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
