"""The real collector over a real child, for tests: over the stand-in library, or over NVIDIA's own."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.children.requests import WorkerState
from slurm_watchdog.agent.gpu.nvml import HEALTH, LIST, NvmlMemory
from slurm_watchdog.agent.gpu.reader import GpuReader
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import Gpu, HungProbe, NodeEvent
from tests.builders.requests import BY_NAME, tasks
from tests.rig.standin_nvml.standin import Scenario

SHORT_DEADLINE_S = 0.5


class Node:
    """The collector with a real child, which finds the stand-in where others find NVIDIA's library; without
    both, that one."""

    def __init__(
        self, library: Path | None = None, scenario: Scenario | None = None, *, hurry: bool = True, **limits: int
    ):
        """`hurry`: the first look lists all processes at once, as `--once` does; the daemon takes its time. `limits`
        are the collector's, where they are not its usual ones."""

        def read_gpus(request: Any, state: WorkerState) -> Any:
            if library is not None and scenario is not None:
                ctypes.CDLL(str(library))
                os.environ.update(scenario.environment)
            answer = BY_NAME["read_gpus"].do(request, state)
            session = state.memory(NvmlMemory).session
            with self._turns.open("a") as file:
                for index, (_, identity) in session.devices.items() if session is not None else ():
                    turns = session.kept[identity.uuid].turns
                    file.writelines(f"{what},{index}\n" for what in (LIST, HEALTH) if turns.get(what) == request.now)
            return answer

        self._turns = Path(f"{scenario.path}.turns" if scenario is not None else os.devnull)
        self.probes = Children(tasks(read_gpus=read_gpus))
        self.gpus = GpuReader(self.probes, **limits)
        if hurry:
            self.gpus.want_processes()
        self.later_s = 0.0
        """What has passed besides real time."""
        self.deadline_s, self.patience_s = 20.0, 10.0
        """A busy machine may be slow; tests about slowness take both away with `impatient`."""

    def turns(self) -> list[tuple[str, int]]:
        """(what, index of the GPU) of all that was read in turn so far."""
        lines = [line.split(",") for line in self._turns.read_text().splitlines()]
        return [(what, int(index)) for what, index in lines]

    def impatient(self) -> None:
        self.deadline_s, self.patience_s = SHORT_DEADLINE_S, 0.0

    def patient(self) -> None:
        self.deadline_s, self.patience_s = 20.0, 10.0

    def events(self, later_s: float = 0.0) -> tuple[NodeEvent, ...]:
        return self.gpus.drain_events(clock.monotonic() + self.later_s + later_s)

    def hung(self) -> tuple[HungProbe, ...]:
        return self.probes.hung(clock.monotonic() + self.later_s)

    def tick(self, later_s: float = 0.0) -> tuple[Gpu, ...]:
        self.later_s += later_s
        now = clock.monotonic() + self.later_s
        self.probes.poll(now)
        self.gpus.ask(now, self.deadline_s)
        self.gpus.settle(self.patience_s)
        return self.gpus.collect(now)

    def until(self, condition: Callable[[tuple[Gpu, ...]], bool], later_s: float = 0.0) -> tuple[Gpu, ...]:
        end = clock.monotonic() + 15
        rows = self.tick(later_s)
        while not condition(rows):
            assert clock.monotonic() < end, rows
            time.sleep(0.05)
            rows = self.tick()
        return rows


def read(rows: tuple[Gpu, ...]) -> bool:
    """Whether every GPU answered."""
    return bool(rows) and all(row.error is None for row in rows)
