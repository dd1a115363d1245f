"""Builds the stand-in library and writes what it answers, so that the real pynvml and our real collector run without a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "nvml.c"
SCENARIO = "STANDIN_NVML_SCENARIO"
NOT_SUPPORTED, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 9, 15, 999


def build(directory: Path) -> Path:
    """Compiles `libnvidia-ml.so.1` in `directory`, which then is one for LD_LIBRARY_PATH; returns its path."""
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1",
         "-o", str(library), str(SOURCE), "-lpthread"],
        check=True, timeout=120,
    )  # fmt: skip
    return library


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML would tell of it, in NVML's units. Index, minor and PCI address differ on purpose."""

    uuid: str
    bus: str
    minor: int
    name: str = "NVIDIA H100 80GB HBM3"
    utilization: int = 97
    sm_clock: int = 1980
    memory_clock: int = 2619
    power: int = 653_250
    temperature: int = 61
    memory: tuple[int, int] = (40 * 1024**3, 80 * 1024**3)
    throttle: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    rules: tuple[str, ...] = ()
    """Further lines: `error nvmlDeviceGetPowerUsage 999`, `delay CALL SECONDS`, `hang CALL`, `lost`."""

    def lines(self) -> list[str]:
        return [
            "gpu",
            f"uuid {self.uuid}",
            f"bus {self.bus}",
            f"minor {self.minor}",
            f"name {self.name}",
            f"utilization {self.utilization} 40",
            f"sm_clock {self.sm_clock}",
            f"memory_clock {self.memory_clock}",
            f"power {self.power}",
            f"temperature {self.temperature}",
            f"memory {self.memory[0]} {self.memory[1]}",
            f"throttle {self.throttle:#x}",
            *(f"process {pid} {used}" for pid, used in self.processes),
            *self.rules,
        ]


TWO = (
    Gpu(uuid="GPU-aaaa", bus="00000000:C1:00.0", minor=5),
    Gpu(uuid="GPU-bbbb", bus="00000000:07:00.0", minor=2, utilization=0, power=71_000),
)


@dataclass
class Scenario:
    """The file that the library reads, and what stands in it."""

    path: Path
    gpus: tuple[Gpu, ...] = TWO
    rules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {SCENARIO: str(self.path)}
        self.write()

    def write(self) -> None:
        """At one moment, as the library may be reading."""
        lines = [*self.rules, *(line for gpu in self.gpus for line in gpu.lines())]
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        os.replace(fresh, self.path)

    def change(self, index: int, **changes: object) -> None:
        """GPU `index` is different from now on."""
        gpus = list(self.gpus)
        gpus[index] = replace(gpus[index], **changes)  # type: ignore[arg-type]
        self.gpus = tuple(gpus)
        self.write()

    def rule(self, *rules: str) -> None:
        """Lines about the library and every GPU, instead of those before."""
        self.rules = rules
        self.write()

    def only(self, gpus: Sequence[Gpu]) -> None:
        """These GPUs and no others."""
        self.gpus = tuple(gpus)
        self.write()
