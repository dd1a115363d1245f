"""Who reads the GPUs of this node: the first vendor whose library is here. For the child.

A vendor is one module with a function as `Reader`, and its row here. What it answers, in NVML's units, is all that the
rest of the agent knows of it. A node with cards of two vendors is read through the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from slurm_watchdog.agent.gpu import amd_smi, nvml
from slurm_watchdog.agent.workers.answer_types import GpuReading
from slurm_watchdog.agent.workers.request_types import ReadGpus
from slurm_watchdog.agent.workers.worker_state import WorkerState

Reader = Callable[[ReadGpus, WorkerState], GpuReading]
"""Answers for every GPU; with `missing`, and why, where this vendor has no driver or library here. Raises nothing."""
VENDORS: Final[tuple[Reader, ...]] = (nvml.read_gpus, amd_smi.read_gpus)


@dataclass
class Found:
    """Who has answered in this child."""

    reader: Reader | None = None


def read_gpus(request: ReadGpus, worker: WorkerState) -> GpuReading:
    """What every GPU says now; where nobody reads them, why the first vendor does not."""
    memory = worker.memory(Found)
    readings = []
    for reader in VENDORS if memory.reader is None else (memory.reader,):
        reading = reader(request, worker)
        if not reading.missing:
            memory.reader = reader
            return reading
        readings.append(reading)
    return readings[0]
