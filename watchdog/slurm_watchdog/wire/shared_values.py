"""Texts and numbers that are alike in the reports of thousands of nodes, held once. Pure.

Each report that is decoded has values of its own: a GPU's name and memory, the number of its slot, a command, the id of
a job and of its owner. A whole report is what reports of changes build on, and so they stay, 64 bytes or more for each
text, 32 for each number. Interned texts go with the last report that has them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from sys import intern
from typing import Any, Final

from msgspec.structs import replace

from slurm_watchdog.model.observations import Gpu, Process
from slurm_watchdog.model.report import Report

shared_number: Final[Callable[[Any], Any]] = lru_cache(maxsize=8192, typed=True)(lambda number: number)
"""Given a number, or None, the first one that was equal to it: of users, of sizes of jobs and GPUs, of clocks and
temperatures."""


def with_shared_values(report: Report) -> Report:
    """The same report."""
    return replace(
        report,
        node=intern(report.node),
        boot_id=intern(report.boot_id),
        agent_id=intern(report.agent_id),
        processes=tuple(map(_process, report.processes)),
        gpus=tuple(map(_gpu, report.gpus)),
    )


def _process(process: Process) -> Process:
    return replace(
        process,
        job_id=intern(process.job_id),
        uid=shared_number(process.uid),
        world_size=shared_number(process.world_size),
        comm=intern(process.comm),
        state=intern(process.state),
        step_id=None if process.step_id is None else intern(process.step_id),
    )


def _gpu(gpu: Gpu) -> Gpu:
    return replace(
        gpu,
        uuid=intern(gpu.uuid),
        pci_bus_id=None if gpu.pci_bus_id is None else intern(gpu.pci_bus_id),
        name=intern(gpu.name),
        memory_total_bytes=shared_number(gpu.memory_total_bytes),
    )
