"""Whole listings of Slurm's commands: a row that cannot be read is an error."""

from __future__ import annotations

from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.slurm import parse
from slurm_watchdog.slurm.node_names import all_or_none


def parse_jobs(text: str, marks: parse.Marks) -> tuple[SlurmJob, ...]:
    return all_or_none(parse.list_jobs(text, marks))


def parse_nodes(text: str, marks: parse.Marks) -> tuple[SlurmNode, ...]:
    return all_or_none(parse.list_nodes(text, marks))
