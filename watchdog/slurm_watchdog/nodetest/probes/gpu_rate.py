"""How fast each GPU of a node is, by torch from a Python that the site names, and its clock meanwhile, by NVML.

The program is torch_program.py, which runs in that interpreter. Never run on a GPU so far (docs/limits.md).
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_watchdog.base import clock
from slurm_watchdog.nodetest.probes import torch_program
from slurm_watchdog.nodetest.probes.gpu_health import SLOWED, SM_CLOCK
from slurm_watchdog.nodetest.probes.repeat import figure

LOOK_S = 0.2
"""Between two looks at the clocks."""
SETTLED = 0.25
"""The first quarter of a load does not count: the clock is still rising."""
SLOWEST = 10
"""A tenth of the repetitions may be slower than what counts as the slowest: one of ten is an accident."""


def measure_gpu_rate(asked: dict[str, Any]) -> dict[str, Any]:
    """Figures of GPU N, as torch numbers it: `gpu_matmul/N` (TFLOP/s), `gpu_steadiness/N` (%), `gpu_memory/N`,
    `gpu_h2d/N`, `gpu_d2h/N`, `gpu_p2p/N` (GB/s), `gpu_clock/N` (MHz). Facts: `gpus`, and per GPU `gpu_N` which it is.
    `skipped`: there is no such Python, or no torch for GPUs. Raises OSError with torch's last line."""
    looks = ClockLooks(_nvml())
    argv = [asked["python"], "-c", program(), str(asked["seconds"]), asked.get("device", "cuda")]
    try:
        code, output, errors = run_and_look(argv, looks)
    except OSError as error:  # what is not installed says nothing about a GPU
        return {"figures": {}, "facts": {"skipped": f"{asked['python']} cannot be started: {error.strerror}"}}
    if code:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise OSError(f"{asked['python']} ended with {code}: {lines[-1] if lines else ''}"[:400])
    found = json.loads(output.decode().strip().splitlines()[-1])
    return {"figures": {}, "facts": found} if "skipped" in found else summed_up(found, looks.seen)


def program() -> str:
    """The source of torch_program.py: on a node it came as text (program.LOAD keeps it)."""
    sent: str | None = getattr(torch_program, "SOURCE_TEXT", None)
    return sent or inspect.getsource(torch_program)


def summed_up(found: Mapping[str, Any], looks: Sequence[tuple[float, str, int, bool]]) -> dict[str, Any]:
    """What the program printed, and what NVML showed meanwhile, as figures and facts."""
    rates: Mapping[str, list[float]] = found["rates"]
    figures = {name: figure(values) for name, values in rates.items()}
    figures.update({
        name.replace("gpu_matmul", "gpu_steadiness"): steadiness(values)
        for name, values in rates.items() if name.startswith("gpu_matmul/")
    })  # fmt: skip
    facts: dict[str, Any] = {"gpus": len(found["cards"])}
    for index, card in found["cards"].items():
        began, ended = found["loads"][index]
        began += SETTLED * (ended - began)
        during = [each for each in looks if each[1] == card.get("uuid") and began <= each[0] <= ended]
        facts[f"gpu_{index}"] = dict(card)
        if during:
            figures[f"gpu_clock/{index}"] = figure([float(each[2]) for each in during])
            facts[f"gpu_{index}"]["slowed_share"] = round(sum(each[3] for each in during) / len(during), 2)
    return {"figures": figures, "facts": facts}


def steadiness(rates: Sequence[float]) -> list[Any]:
    """A figure: the slowest repetitions (the tenth percentile) in per cent of the median."""
    middle = statistics.median(rates)
    slowest = sorted(rates)[len(rates) // SLOWEST]
    return [100.0 * slowest / middle if middle else 0.0, 0.0, len(rates), False]


class ClockLooks:
    """What NVML shows of all GPUs, as often as `look` is called; nothing without NVML."""

    def __init__(self, nvml: Any) -> None:
        self.seen: list[tuple[float, str, int, bool]] = []
        self._nvml, self._handles = nvml, _handles(nvml) if nvml is not None else {}

    def look(self) -> None:
        """A card that does not answer has no entry."""
        for uuid, handle in self._handles.items():
            try:
                mhz = self._nvml.nvmlDeviceGetClockInfo(handle, SM_CLOCK)
                slowed = bool(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & SLOWED)
            except self._nvml.NVMLError:
                continue
            self.seen.append((clock.monotonic(), uuid, mhz, slowed))


def run_and_look(argv: Sequence[str], looks: ClockLooks) -> tuple[int, bytes, bytes]:
    """(exit code, output, errors) of a program; `looks` looks every 0.2 s. CUDA numbers the GPUs as NVML does, by their
    PCI addresses (CUDA_DEVICE_ORDER, CUDA C++ Programming Guide), and not the fastest first. Raises OSError."""
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    process = subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while True:
        try:
            output, errors = process.communicate(timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            looks.look()
            continue
        return process.returncode, output, errors


def _nvml() -> Any:
    """pynvml where the node's Python has it and it answers."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _handles(nvml: Any) -> dict[str, Any]:
    """UUID to handle of each GPU that the job may use."""
    found: dict[str, Any] = {}
    ask: Callable[[int], Any] = nvml.nvmlDeviceGetHandleByIndex
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = ask(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:
            continue
        found[uuid.decode() if isinstance(uuid, bytes) else str(uuid)] = handle
    return found
