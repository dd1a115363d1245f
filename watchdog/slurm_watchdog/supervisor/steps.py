"""Steps of a job as `scontrol --oneliner show step JOB` lists them, and which of them are the command's. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

_STEP = re.compile(r"^StepId=\S+?\.(\d{1,10})\s.*\bSrunHost:Pid=([^\s:]+):(\d{1,10})", re.MULTILINE)


class Step(NamedTuple):
    """A step, and the srun that started it."""

    number: str
    host: str
    pid: int


def parse_steps(text: str) -> Iterator[Step]:
    """The numbered steps; those of the batch script and of Slurm itself are left out."""
    for number, host, pid in _STEP.findall(text):
        yield Step(number, host, int(pid))


def own_steps(steps: Iterable[Step], host: str, pids: Collection[int]) -> list[Step]:
    """Those that a process of `pids` on this host has started."""
    short = host.partition(".")[0]
    return [each for each in steps if each.host.partition(".")[0] == short and each.pid in pids]
