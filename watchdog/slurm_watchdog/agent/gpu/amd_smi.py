"""AMD's GPUs through AMD SMI (amdsmi, the Python interface that ROCm installs), in the child that reads NVML elsewhere.

Rows are the same as NVML's, in its units. Utilisation, clock, power, temperature and memory are read in every tick;
processes, ECC and PCIe of a GPU in turn. A value that a card does not have (`N/A`, or an exception) is None.
Functions and results: ROCm's AMD SMI Python API reference, 6.4 to 7.2.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from msgspec.structs import replace

from slurm_watchdog.agent.gpu.nvml import MAX_GPUS, MAX_LISTED, PROCESSES
from slurm_watchdog.agent.workers.answer_types import GpuHealthRow, GpuProcesses, GpuReading, GpuRow
from slurm_watchdog.agent.workers.request_types import ReadGpus
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base import clock

ROCM_PYTHON: Final = "/opt/rocm/share/amd_smi"
"""Where ROCm's packages put the Python interface; it may also be installed as any other package."""
MB: Final = 1024**2
"""Unit of amdsmi_get_gpu_vram_usage."""
NOT_KNOWN: Final = "N/A"
"""What AMD SMI answers for what a card has not got."""
_BUS_ID: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
POWERS: Final = ("socket_power", "current_socket_power", "average_socket_power")
"""Watts; which of them a card has depends on its generation, and on the release."""


@dataclass
class AmdMemory:
    """The child's session, None before the first request and after a failure."""

    session: Session | None = None
    has_worked: bool = False
    """One was opened: this node has a driver, whatever is the matter with it now."""


def read_gpus(request: ReadGpus, worker: WorkerState) -> GpuReading:
    """What every GPU says now; `missing` where there is no AMD SMI, or where it has never found its driver: a node
    without AMD's cards may have the Python package."""
    memory = worker.memory(AmdMemory)
    try:
        if memory.session is None:
            memory.session, memory.has_worked = Session(_library()), True
        return memory.session.read(request.dear, request.budget_s)
    except ImportError as error:
        return GpuReading(missing=f"AMD SMI: {error}")
    except Exception as error:  # noqa: BLE001 - its exceptions have no common class in all releases
        memory.session = None
        why = f"AMD SMI: {_first_line(error)}"
        return GpuReading(error=why) if memory.has_worked else GpuReading(missing=why)


def _library() -> Any:
    """The module. Raises ImportError."""
    if os.path.isdir(ROCM_PYTHON) and ROCM_PYTHON not in sys.path:
        sys.path.append(ROCM_PYTHON)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints where it has not found its library
            return importlib.import_module("amdsmi")
    except Exception as error:  # noqa: BLE001 - without its library it ends with a KeyError
        raise ImportError(f"{type(error).__name__}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


@dataclass
class Session:
    """One session: from amdsmi_init until the child ends."""

    smi: Any
    driver_s: float = 0.0
    _identities: dict[int, GpuRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timed(self.smi.amdsmi_init)

    def timed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls into the library, and counts the time."""
        began = clock.monotonic()
        try:
            return function(*args)
        finally:
            self.driver_s += clock.monotonic() - began

    def read(self, dear: Literal["all"] | list[tuple[int, str]], budget_s: float) -> GpuReading:
        """One answer."""
        self.driver_s = 0.0
        handles = self.timed(self.smi.amdsmi_get_processor_handles)[:MAX_GPUS]
        rows = [self._row(index, handle) for index, handle in enumerate(handles)]
        turns = [(index, PROCESSES) for index in range(len(handles))] if dear == "all" else dear
        for number, (index, what) in enumerate(turns):
            if index < len(handles) and (dear == "all" or number == 0 or self.driver_s < budget_s):
                rows[index] = self._dear(handles[index], what, rows[index])
        return GpuReading(gpus=tuple(rows), driver_s=self.driver_s)

    def _ask(self, name: str, handle: Any, *more: Any) -> Any:
        """What this function says of the GPU; None where it has no answer, or this release no such function."""
        try:
            return self.timed(getattr(self.smi, name), handle, *more)
        except Exception:  # noqa: BLE001 - see read_gpus
            return None

    def _member(self, enumeration: str, name: str) -> Any:
        """None where this release has none of that name: the function that is given it refuses."""
        return getattr(getattr(self.smi, enumeration, None), name, None)

    def _clock(self, handle: Any, name: str) -> Any:
        return self._ask("amdsmi_get_clock_info", handle, self._member("AmdSmiClkType", name))

    def _row(self, index: int, handle: Any) -> GpuRow:
        uuid = self._ask("amdsmi_get_gpu_device_uuid", handle)
        if not isinstance(uuid, str) or uuid in ("", NOT_KNOWN):
            known = self._identities.get(index, GpuRow(index=index))
            return replace(known, error="AMD SMI does not say which GPU this is", unreadable=True)
        if self._identities.get(index, GpuRow(index=index)).uuid != uuid:
            asic = self._ask("amdsmi_get_gpu_asic_info", handle)
            name = _of(asic, "market_name")
            bus_id = self._ask("amdsmi_get_gpu_device_bdf", handle)
            self._identities[index] = GpuRow(
                index=index, uuid=uuid, bus_id=bus_id if _BUS_ID.fullmatch(str(bus_id)) else None,
                name=name if isinstance(name, str) else "",
            )  # fmt: skip
        power = self._ask("amdsmi_get_power_info", handle)
        watts = next((found for key in POWERS if (found := _number(power, key))), None)
        memory = self._ask("amdsmi_get_gpu_vram_usage", handle)
        used, total = _number(memory, "vram_used"), _number(memory, "vram_total")
        heat = self._ask(
            "amdsmi_get_temp_metric",
            handle,
            self._member("AmdSmiTemperatureType", "HOTSPOT"),
            self._member("AmdSmiTemperatureMetric", "CURRENT"),
        )
        return replace(
            self._identities[index],
            utilization_percent=_number(self._ask("amdsmi_get_gpu_activity", handle), "gfx_activity"),
            sm_clock_mhz=_number(self._clock(handle, "GFX"), "clk"),
            power_mw=None if watts is None else watts * 1000,
            temperature_c=_number({"": heat}, ""),
            memory_bytes=None if used is None or not total else (used * MB, total * MB),
        )

    def _dear(self, handle: Any, what: str, row: GpuRow) -> GpuRow:
        if row.unreadable:
            return row
        return (
            replace(row, processes=self._processes(handle))
            if what == PROCESSES
            else replace(row, health=self._health(handle))
        )

    def _processes(self, handle: Any) -> GpuProcesses | None:
        listed = self._ask("amdsmi_get_gpu_process_list", handle)
        if not isinstance(listed, list):
            return None
        rows = [(_number(each, "pid"), _number(_of(each, "memory_usage"), "vram_mem")) for each in listed[:MAX_LISTED]]
        if any(pid is None for pid, _ in rows):  # who it is, it does not say: that is not nobody
            return None
        return tuple((pid, used) for pid, used in rows if pid)

    def _health(self, handle: Any) -> GpuHealthRow:
        ecc = self._ask("amdsmi_get_gpu_total_ecc_count", handle)
        pcie = self._ask("amdsmi_get_pcie_info", handle)
        now, most = _of(pcie, "pcie_metric"), _of(pcie, "pcie_static")
        return GpuHealthRow(
            memory_clock_mhz=_number(self._clock(handle, "MEM"), "clk"),
            ecc_corrected=_number(ecc, "correctable_count"),
            ecc_uncorrected=_number(ecc, "uncorrectable_count"),
            pcie_link_width=_number(now, "pcie_width"),
            pcie_link_width_max=_number(most, "max_pcie_width"),
            pcie_replays=_number(now, "pcie_replay_count"),
        )


def _of(answer: Any, key: str) -> Any:
    return answer.get(key) if isinstance(answer, Mapping) else None


def _number(answer: Any, key: str) -> int | None:
    """A whole number of an answer; `N/A` and what is none is None, and so is what overflowed."""
    value = _of(answer, key)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**63
    return int(value) if number else None
