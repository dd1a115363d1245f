"""Builds the stand-in library and writes what it answers, so that the real pynvml and our real collector run
without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent / "nvml.c"
SCENARIO = "STANDIN_NVML_SCENARIO"
NOT_SUPPORTED, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 9, 13, 15, 999
XID, ECC_DOUBLE_BIT = 8, 2
"""nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError."""


def can_build() -> bool:
    """Whether this machine has a C compiler."""
    return shutil.which("cc") is not None


def build(directory: Path, without: Iterable[str] = ()) -> Path:
    """Compiles `libnvidia-ml.so.1` in `directory`, which then is one for LD_LIBRARY_PATH; returns its path.

    `without`: functions that this library has not got, as an older driver's.
    """
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1",
         *(f"-D{name}=absent_{name}" for name in without), "-o", str(library), str(SOURCE), "-lpthread"],
        check=True, timeout=120,
    )  # fmt: skip
    return library


def environment_of(library: Path, scenario: Path) -> dict[str, str]:
    """What a process needs in its environment to find the library and what it answers."""
    return {"LD_LIBRARY_PATH": str(library.parent), SCENARIO: str(scenario)}


@dataclass(frozen=True)
class Instance:
    """One slice of a GPU in MIG mode. Memory is (used, total) in bytes."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    memory: tuple[int, int] = (1024**3, 10 * 1024**3)


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML would tell of it, in NVML's units; None: NVML_ERROR_NOT_SUPPORTED. Index, minor and PCI
    address differ on purpose."""

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
    """(pid, bytes) that compute; -1 bytes: NVML does not know."""
    graphics: tuple[tuple[int, int], ...] = ()
    ecc: tuple[int, int] | None = None
    """Corrected and uncorrected since the driver was loaded."""
    remapped: tuple[int, int, int, int] | None = None
    """Rows corrected, rows uncorrected, pending, failed."""
    retired: tuple[int, int, int] | None = None
    """Pages for single-bit and for double-bit errors, pending."""
    pcie: tuple[int, int, int, int] | None = None
    """Width, its maximum, generation, its maximum."""
    replays: int | None = None
    links: tuple[tuple[int, int, int, int], ...] = ()
    """Each NVLink: active, replay, recovery and CRC errors."""
    link_counters: str = "totals"
    """How those can be asked: `totals` (up to Ampere), `links` (Hopper), `calls` (old drivers), `none` (Blackwell)."""
    gpm: tuple[float, ...] | None = None
    """Multiprocessors, tensor cores, memory (per cent), NVLink in and out, PCIe in and out (MiB a second); -1: not known."""
    mig: bool | None = None
    instances: tuple[Instance, ...] = ()
    events: tuple[tuple[int, int, int], ...] = ()
    """(sequence, Xid, type of event): sequences rise over all GPUs."""
    event_types: int = 0x1F
    rules: tuple[str, ...] = ()
    """Further lines: `error nvmlDeviceGetPowerUsage 999`, `delay CALL SECONDS`, `hang CALL`, `lost`."""

    def lines(self) -> list[str]:
        optional: dict[str, Any] = {
            "ecc": self.ecc,
            "remapped": self.remapped,
            "retired": self.retired,
            "pcie": self.pcie,
            "replays": None if self.replays is None else (self.replays,),
            "gpm": self.gpm,
            "mig": None if self.mig is None else (int(self.mig),),
        }
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
            *(f"graphics {pid} {used}" for pid, used in self.graphics),
            *(f"{word} {_words(values)}" for word, values in optional.items() if values is not None),
            *(f"link {_words(link)}" for link in self.links),
            f"link_counters {self.link_counters}",
            *(
                f"instance {it.gpu_instance} {it.compute_instance} {it.uuid} {_words(it.memory)}"
                for it in self.instances
            ),
            *(f"event {_words(event)}" for event in self.events),
            f"event_types {self.event_types}",
            *self.rules,
        ]


def _words(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


TWO = (
    Gpu(uuid="GPU-aaaa", bus="00000000:C1:00.0", minor=5),
    Gpu(uuid="GPU-bbbb", bus="00000000:07:00.0", minor=2, utilization=0, power=71_000),
)

BUSY_CARD: Mapping[str, Any] = {
    "name": "NVIDIA A100-SXM4-80GB",
    "utilization": 100,
    "sm_clock": 1410,
    "memory_clock": 1593,
    "power": 86_000,
    "temperature": 35,
    "throttle": 0,
}
"""Case 1 of the case book: what 63 of 64 cards said while they span in a collective. Temperature and memory
clock are not told there."""
FROZEN_CARD: Mapping[str, Any] = {
    **BUSY_CARD,
    "utilization": 0,
    "sm_clock": 1155,
    "power": 68_000,
    "temperature": 28,
    "throttle": 0x1,
}
"""The same case: the card whose rank stood in `write` on the frozen filesystem."""

HEALTHY: Mapping[str, Any] = {
    "ecc": (0, 0),
    "remapped": (0, 0, 0, 0),
    "pcie": (16, 16, 4, 4),
    "replays": 0,
    "links": ((1, 0, 0, 0),) * 12,
    "mig": False,
}
"""What an A100 with all its NVLinks says of its health."""


def eight_cards(**changes: object) -> tuple[Gpu, ...]:
    """A node of eight busy, healthy A100; `changes` are the same for all."""
    fields: dict[str, Any] = {**BUSY_CARD, **HEALTHY, **changes}
    buses = (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)
    return tuple(
        Gpu(
            uuid=f"GPU-{i:08x}-0000-4000-8000-00000000000{i}",
            bus=f"00000000:{bus:02X}:00.0",
            minor=(i + 4) % 8,
            **fields,
        )
        for i, bus in enumerate(buses)
    )


UTILIZATION_S, MEMORY_S, PROCESS_LIST_S = 2.5e-6, 12e-6, 4.5e-3
OTHER_CALLS_S = 5.5e-6
"""Nobody has measured the rest for us: the geometric mean of utilisation and memory, an assumption."""


def field_latencies() -> tuple[str, ...]:
    """Rules for a Scenario: each call takes as long as FIELD.md says that NVML's takes (measured by
    MangoHud's authors)."""
    lists = [f"nvmlDeviceGet{kind}RunningProcesses_v{n}" for kind in ("Compute", "Graphics") for n in (2, 3)]
    return (
        f"delay nvmlDeviceGetUtilizationRates {UTILIZATION_S}",
        f"delay nvmlDeviceGetMemoryInfo {MEMORY_S}",
        *(f"delay {name} {PROCESS_LIST_S}" for name in lists),
        f"delay * {OTHER_CALLS_S}",
    )


@dataclass
class Scenario:
    """The file that the library reads, and what stands in it."""

    path: Path
    gpus: tuple[Gpu, ...] = TWO
    rules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    _sequence: int = 0

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

    def event(self, index: int, xid: int, kind: int = XID) -> None:
        """GPU `index` reports `xid` now, once to everyone who has registered."""
        self._sequence += 1
        self.change(index, events=(*self.gpus[index].events, (self._sequence, xid, kind)))

    def rule(self, *rules: str) -> None:
        """Lines about the library and every GPU, instead of those before."""
        self.rules = rules
        self.write()

    def only(self, gpus: Sequence[Gpu]) -> None:
        """These GPUs and no others."""
        self.gpus = tuple(gpus)
        self.write()
