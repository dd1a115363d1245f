"""Steps of a job as `scontrol --oneliner show step JOB` lists them, and which of them are the command's. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from slurm_watchdog.slurm.fields import ParseError
from slurm_watchdog.slurm.node_names import expand_nodes

_STEP = re.compile(r"^StepId=\S+?\.(\d{1,10})\s(.*)\bSrunHost:Pid=([^\s:]+):(\d{1,10})", re.MULTILINE)
_NODES = re.compile(r"\bNodeList=(\S+)")
"""Before the name of the step, which may be anything."""


class Step(NamedTuple):
    """A step, and the srun that started it."""

    number: str
    host: str
    pid: int
    nodes: str = ""
    """As Slurm writes a list of nodes; empty: not known."""


def parse_steps(text: str) -> Iterator[Step]:
    """The numbered steps; those of the batch script and of Slurm itself are left out."""
    for number, facts, host, pid in _STEP.findall(text):
        nodes = _NODES.search(facts)
        yield Step(number, host, int(pid), nodes[1] if nodes is not None else "")


def own_steps(steps: Iterable[Step], host: str, pids: Collection[int]) -> list[Step]:
    """Those that a process of `pids` on this host has started."""
    short = host.partition(".")[0]
    return [each for each in steps if each.host.partition(".")[0] == short and each.pid in pids]


def nodes_of(step: Step) -> tuple[str, ...]:
    """Where it runs; nothing where Slurm does not say."""
    try:
        return expand_nodes(step.nodes)
    except ParseError:
        return ()
