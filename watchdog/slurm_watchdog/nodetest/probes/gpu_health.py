"""GPUs of a node as NVML shows them: presence, memory errors, NVLink, PCIe, clocks. Standard library, and pynvml where
the node's Python has it.

Never run on a GPU so far: written against NVML's documentation and run on a stand-in library (docs/limits.md).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

from slurm_watchdog.nodetest.probes import kernel_log

SLOWED = 0x8 | 0x40 | 0x80
"""nvmlClocksThrottleReasonHwSlowdown, …HwThermalSlowdown, …HwPowerBrakeSlowdown (nvml.h)."""
SM_CLOCK, UNCORRECTED, CORRECTED, VOLATILE = 1, 1, 0, 0
"""NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, …_CORRECTED, NVML_VOLATILE_ECC (nvml.h)."""
LINKS = 18
"""NVML_NVLINK_MAX_LINKS (nvml.h)."""


def measure_gpu_health(asked: dict[str, Any]) -> dict[str, Any]:
    """Facts: `gpus`, `expected` (what Slurm gave the job), per GPU `gpu_N` with what NVML says, and the Xids of the
    kernel's log. Asked again after the load (`subject` "after"), the difference is the judge's. Raises OSError where
    NVML answers with an error."""
    expected = os.environ.get("SLURM_GPUS_ON_NODE", "")
    facts: dict[str, Any] = {"expected": int(expected) if expected.isdecimal() else None, **kernel_log.xid_facts()}
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {"figures": {}, "facts": {**facts, "skipped": "pynvml is not installed on the node"}}
    try:
        nvml.nvmlInit()
        facts["gpus"] = nvml.nvmlDeviceGetCount()
        for index in range(facts["gpus"]):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                if type(error).__name__ != "NVMLError_NoPermission":
                    raise
                continue  # it is counted, but the job's cgroup does not have it
            facts[f"gpu_{index}"] = _card(nvml, handle)
    except nvml.NVMLError as error:
        kind = type(error).__name__
        if kind == "NVMLError_LibraryNotFound":
            return {"figures": {}, "facts": {**facts, "skipped": "NVML is not installed on the node"}}
        if kind == "NVMLError_DriverNotLoaded" and not facts["expected"]:  # a node without a GPU, of the same image
            return {"figures": {}, "facts": {**facts, "gpus": 0, "skipped": "no NVIDIA driver is loaded"}}
        raise OSError(f"NVML says: {error}") from error
    return {"figures": {}, "facts": facts}


def usable_gpus() -> int:
    """How many the job may use: as Slurm says, else as many as NVML lets it open; 0: not known."""
    expected = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if expected.isdecimal():
        return int(expected)
    facts = measure_gpu_health({})["facts"]
    return sum(name.startswith("gpu_") and isinstance(value, dict) for name, value in facts.items())


def _card(nvml: Any, handle: Any) -> dict[str, Any]:
    """What it answers; a question that it does not support is left out."""
    questions: dict[str, Callable[[], Any]] = {
        "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
        "serial": lambda: _text(nvml.nvmlDeviceGetSerial(handle)),
        "bus": lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "model": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, VOLATILE),
        "corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, CORRECTED, VOLATILE),
        "remap_failed": lambda: bool(nvml.nvmlDeviceGetRemappedRows(handle)[3]),
        "slowed": lambda: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & SLOWED),
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, SM_CLOCK),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, 0),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_width_most": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
        "nvlinks_up": lambda: _links(nvml, handle),
    }
    found: dict[str, Any] = {}
    for name, ask in questions.items():
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            found[name] = ask()
    return found


def _links(nvml: Any, handle: Any) -> int:
    up = 0
    for link in range(LINKS):
        with contextlib.suppress(nvml.NVMLError):
            up += nvml.nvmlDeviceGetNvLinkState(handle, link) == 1
    return up


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
