"""What our `srun` has to know of the present start. Pure.

Standard library only: it is read at every call of srun in the command.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

LOOK_MARK: Final = "slurm-watchdog-look "
"""Begins the line that `look` prints on each node: a site's prolog may print, too."""


class Plan(NamedTuple):
    """Written by the supervisor for each start, read by its `srun`."""

    job_id: str
    srun: str
    """Path of the real one."""
    directory: str
    """Of our own srun: taken out of PATH behind it."""
    nodes: tuple[str, ...]
    """Of this start, in the order of the allocation."""
    left_out: tuple[str, ...]
    """Nodes of the allocation that this start does not use: avoided ones, and spares."""
    tasks: int
    """Of the command on `nodes`; 0: the allocation has no number of tasks."""
    all_tasks: int
    """On all nodes of the allocation, as the script knows it."""
    overlap: bool
    """An older step is still there."""
    gpus: int = 0
    """Of `nodes`; 0: not known."""
    all_gpus: int = 0
    """Of all nodes of the allocation, as the script knows it."""


def to_text(plan: Plan) -> str:
    """One JSON document."""
    return json.dumps(plan._asdict())


def from_text(text: str) -> Plan:
    """The plan in a file. Raises ValueError and TypeError if it is none."""
    fields = json.loads(text)
    return Plan(**{**fields, "nodes": tuple(fields["nodes"]), "left_out": tuple(fields["left_out"])})
