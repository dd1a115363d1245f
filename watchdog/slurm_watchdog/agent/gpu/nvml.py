"""NVML, in a child of its own: any of its calls may take seconds, or never return while a GPU is in trouble.

Nothing here is imported by the agent's loop but the name of the function. The child keeps one NVML session, and in
it an event set for faults. What changes quickly is read in every tick. What is dear or slow is read in turn, a GPU
at a time, as much as fits in the driver time that a tick may cost: a list of processes takes about 4.5 ms a GPU
under the driver's global lock, in which training may wait, while utilisation takes 2.5 us and memory 12 us.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import GpuProcesses, GpuReading, GpuRow
from slurm_watchdog.agent.children.requests import ReadGpus, WorkerState
from slurm_watchdog.agent.gpu.nvml_health import EventSet, read_health
from slurm_watchdog.base import clock

# How much of a GPU works, by NVML's GPM (GPU Performance Monitoring: Hopper and later), for the NVML child.
# Utilisation is 100 % also while one small kernel spins in a collective; GPM counts the share of the multiprocessors,
# of the tensor cores and of the memory's bandwidth that was in use between two samples. One is taken when it is the
# GPU's turn, once a minute, so that a value is the average since the turn before.

MIB = float(2**20)
METRICS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("sm_active_ratio", ("NVML_GPM_METRIC_SM_UTIL",), 0.01),
    ("tensor_active_ratio", ("NVML_GPM_METRIC_ANY_TENSOR_UTIL",), 0.01),
    ("dram_active_ratio", ("NVML_GPM_METRIC_DRAM_BW_UTIL",), 0.01),
    ("nvlink_bytes_s", ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC"), MIB),
    ("pcie_bytes_s", ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", "NVML_GPM_METRIC_PCIE_TX_PER_SEC"), MIB),
)
"""(name in the answer, the metrics whose sum it is, their unit: per cent, MiB a second; nvmlGpmMetricId_t)."""


@dataclass
class Activity:
    """The newest sample of one GPU; a GPU without GPM is asked once."""

    supported: bool | None = None
    _last: Any = None
    _spare: Any = None

    def read(self, nvml: Any, timed: Callable[..., Any], handle: Any, fatal: set[int]) -> dict[str, float]:
        """What it did since the last call; empty at first, or unsaid. Raises NVMLError if its code is in `fatal`."""
        try:
            if self.supported is None:
                self.supported = bool(timed(nvml.nvmlGpmQueryDeviceSupport, handle).isSupportedDevice)
            return self._since_last(nvml, timed, handle) if self.supported else {}
        except nvml.NVMLError as error:
            if error.value in fatal:
                raise
            self.supported = False  # not for this user, or not on this card
            return {}

    def _since_last(self, nvml: Any, timed: Callable[..., Any], handle: Any) -> dict[str, float]:
        sample = self._spare or timed(nvml.nvmlGpmSampleAlloc)
        timed(nvml.nvmlGpmSampleGet, handle, sample)
        before, self._last = self._last, sample
        self._spare = before
        if before is None:
            return {}
        wanted = [name for _, names, _ in METRICS for name in names]
        asked = nvml.c_nvmlGpmMetricsGet_t(
            version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(wanted), sample1=before, sample2=sample
        )
        for metric, name in zip(asked.metrics, wanted, strict=False):
            metric.metricId = getattr(nvml, name)
        timed(nvml.nvmlGpmMetricsGet, asked)
        told = {
            name: metric.value
            for name, metric in zip(wanted, asked.metrics, strict=False)
            if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value) and metric.value >= 0
        }
        return {
            what: sum(told[name] for name in names) * unit
            for what, names, unit in METRICS
            if all(name in told for name in names)
        }


PROCESSES, HEALTH = "processes", "health"
"""What is read in turn: who computes on a GPU, and how it fares (ECC, links, MIG, activity, …)."""
IN_TURN = frozenset({"temperature_c", "memory_used_bytes", "throttle"})
"""Read of half of the GPUs in each tick, and said again in the next: they change slowly, and together with a
list of processes all of them would take as long as a tick may cost."""
MAX_GPUS = 64  # More of one node are not read, whatever the driver counts.
MAX_LISTED = 4096  # Processes of one GPU; far more than a driver has contexts for.


THROTTLE = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's mask (nvmlClocksEventReason*, nvml.h), named as nvidia-smi names them in clocks_event_reasons.*."""


def parse_throttle(mask: int) -> tuple[str, ...]:
    """The names of all bits in `mask`, lowest first; an unknown bit is `bit_N`."""
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return tuple(THROTTLE.get(1 << bit, f"bit_{bit}") for bit in bits)


def parse_bus_id(text: str) -> str:
    """NVML's `00000000:C1:00.0` as the kernel writes it in sysfs and in its log: `0000:c1:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


@dataclass
class Device:
    """A GPU as this session found it. `missing`: values that it said not to have."""

    handle: Any
    identity: GpuRow
    missing: set[str] = field(default_factory=set)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)  # What was read last of IN_TURN.
    activity: Activity = field(default_factory=Activity)


@dataclass
class NvmlMemory:
    """The child's session, None before the first request and after a failure."""

    session: Session | None = None


def read_gpus(request: ReadGpus, worker: WorkerState) -> GpuReading:
    """What every GPU says now, in NVML's units; a value that a GPU does not have is None."""
    import pynvml

    memory = worker.memory(NvmlMemory)
    try:
        if memory.session is None:
            memory.session = Session(pynvml)
        return memory.session.read(request.dear, request.budget_s)
    except pynvml.NVMLError as error:
        memory.session = None
        why = name_error(pynvml, error)
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return GpuReading(missing=why)
        return GpuReading(error=why)


def name_error(nvml: Any, error: Any) -> str:
    """`NVML_ERROR_GPU_IS_LOST: GPU is lost`: the name, which people search for, and NVML's own words."""
    names = [name for name in dir(nvml) if name.startswith("NVML_ERROR_") and getattr(nvml, name) == error.value]
    return f"{names[0] if names else f'NVML error {error.value}'}: {error}"


class Session:
    """One NVML session: from nvmlInit until the child ends, or NVML as a whole refuses."""

    def __init__(self, nvml: Any):
        """Raises NVMLError, as every method here that does not say otherwise."""
        self.nvml = nvml
        self.driver_s = 0.0
        self.devices: dict[int, Device] = {}
        self._count = -1
        self._cost_s = {PROCESSES: 4.5e-3, HEALTH: 5e-4}
        """What each took lately; before the first time, what others have measured."""
        self._fatal = {
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }
        self._quiet = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        self._room = 64
        self._tick = 0
        self.timed(nvml.nvmlInit)
        # The library that pynvml has loaded. pynvml asks twice for a list, once for its length: we ask once,
        # with room for all.
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._fast = _fast_reads(nvml, self._library)
        self._events = EventSet(nvml, self.timed)

    def timed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls into NVML, and counts the time."""
        began = clock.monotonic()
        try:
            return function(*args)
        finally:
            self.driver_s += clock.monotonic() - began

    def read(self, dear: Literal["all"] | list[tuple[int, str]], budget_s: float) -> GpuReading:
        """One answer, see read_gpus."""
        self.driver_s = 0.0
        self._tick += 1
        count = min(self.timed(self.nvml.nvmlDeviceGetCount), MAX_GPUS)
        if count != self._count:
            self.devices.clear()
            self._count = count
        turns = [(index, PROCESSES) for index in range(count)] if dear == "all" else dear
        refused = self._identify(count)
        rows = [
            self._read_fast(index, refused, dear == "all" or (index + self._tick) % 2 == 0) for index in range(count)
        ]
        events = self._events.drain_events((each.handle, each.identity.uuid) for each in self.devices.values())
        for number, (index, what) in enumerate(turns):
            fits = self.driver_s + self._cost_s[what] <= budget_s
            if index < count and (dear == "all" or number == 0 or fits):
                rows[index] = self._read_dear(index, what, rows[index])
        return GpuReading(gpus=tuple(rows), events=tuple(events), driver_s=self.driver_s)

    def _identify(self, count: int) -> dict[int, Any]:
        """Finds out who is at each index that is new. Returns index -> error of those that did not say."""
        refused: dict[int, Any] = {}
        for index in range(count):
            if index not in self.devices:
                try:
                    self.devices[index] = self._identify_one(index)
                except self.nvml.NVMLError as error:
                    refused[index] = error
        return refused

    def _is_in_place(self, index: int, device: Device) -> bool:
        """Whether the GPU at `index` is still this one. If not, all are asked who they are in the next tick."""
        handle = self.timed(self.nvml.nvmlDeviceGetHandleByIndex, index)
        if self.timed(self.nvml.nvmlDeviceGetUUID, handle) == device.identity.uuid:
            device.missing.clear()  # what it had not got a minute ago it may have now: MIG was turned off, say
            return True
        self.devices.clear()
        return False

    def _identify_one(self, index: int) -> Device:
        nvml = self.nvml
        handle = self.timed(nvml.nvmlDeviceGetHandleByIndex, index)
        identity = GpuRow(index=index, uuid=self.timed(nvml.nvmlDeviceGetUUID, handle))
        for name, read in (
            ("pci_bus_id", lambda handle: parse_bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId)),
            ("minor", nvml.nvmlDeviceGetMinorNumber),
            ("name", nvml.nvmlDeviceGetName),
        ):
            try:
                identity = replace(identity, **{name: self.timed(read, handle)})
            except nvml.NVMLError as error:
                if error.value in self._fatal:
                    raise
        return Device(handle, identity)

    def _read_fast(self, index: int, refused: dict[int, Any], everything: bool) -> GpuRow:
        """One row. Who it is remains known while it does not answer: a handle stays with its GPU."""
        device = self.devices.get(index)
        if index in refused or device is None:
            row = device.identity if device is not None else GpuRow(uuid="", index=index)
            return replace(row, error=name_error(self.nvml, refused[index]), unreadable=True)
        row, kept = device.identity, {} if everything else device.kept
        device.kept = {}
        for name, choices in self._fast:
            if name in kept:
                device.kept[name] = kept[name]
                row = replace(row, **kept[name])
            elif name not in device.missing:
                row = self._read_value(device, row, name, choices)
            if row.unreadable:
                device.kept = {}
                break
        return row

    def _read_value(self, device: Device, row: GpuRow, name: str, choices: list[Callable[..., Any]]) -> GpuRow:
        """The row with what one function tells; of several the first that this driver has is the one from now on."""
        if not choices:
            return row
        try:
            values = self.timed(choices[0], device.handle)
            if name in IN_TURN:
                device.kept[name] = values
            return replace(row, **values)
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND and len(choices) > 1:
                del choices[0]
                return self._read_value(device, row, name, choices)
            return self._with_error(device, row, name, error)

    def _with_error(self, device: Device, row: GpuRow, name: str, error: Any) -> GpuRow:
        if error.value in self._fatal:  # it concerns the whole GPU, or the whole session
            return replace(row, error=name_error(self.nvml, error), unreadable=True)
        if error.value in self._quiet:
            device.missing.add(name)
        elif row.error is None:
            return replace(row, error=f"{name}: {name_error(self.nvml, error)}")
        return row

    def _read_dear(self, index: int, what: str, row: GpuRow) -> GpuRow:
        device = self.devices.get(index)
        if device is None or row.unreadable:
            return row
        before = self.driver_s
        try:
            if what == PROCESSES:
                row = replace(row, processes=self._list_processes(device.handle))
            elif self._is_in_place(index, device):
                health = read_health(self.nvml, self.timed, device.handle, self._fatal)
                activity = device.activity.read(self.nvml, self.timed, device.handle, self._fatal)
                row = replace(row, health=replace(health, **activity))
            else:
                row = replace(row, health=None)
        except self.nvml.NVMLError as error:
            row = self._with_error(device, replace(row, **{what: None}), what, error)
        self._cost_s[what] = (self._cost_s[what] + self.driver_s - before) / 2
        return row

    def _list_processes(self, handle: Any) -> GpuProcesses:
        """Those that compute. Those that only draw are left out: to list them, too, would double the time under the
        driver's lock, and a display server is no training. A trainer that draws as well computes, and is listed."""
        nvml = self.nvml
        error = nvml.NVML_ERROR_FUNCTION_NOT_FOUND
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            function = getattr(self._library, name, None)
            if function is None:
                continue
            error, count, buffer = self._fill(function, handle)
            if error == nvml.NVML_SUCCESS:
                unknown = nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
                return tuple(
                    (row.pid, None if row.usedGpuMemory == unknown else row.usedGpuMemory) for row in buffer[:count]
                )
            if error != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                break
        raise nvml.NVMLError(error)

    def _fill(self, function: Any, handle: Any) -> tuple[int, int, Any]:
        """Calls until the buffer is large enough: NVML's code, the number of rows, the rows."""
        while True:
            count = ctypes.c_uint(self._room)
            buffer = (self.nvml.c_nvmlProcessInfo_v3_t * self._room)()  # the same layout as v2's
            error = self.timed(function, handle, ctypes.byref(count), buffer)
            if error != self.nvml.NVML_ERROR_INSUFFICIENT_SIZE or self._room >= MAX_LISTED:
                return error, min(count.value, self._room), buffer
            self._room = min(2 * max(count.value, self._room), MAX_LISTED)


def _fast_reads(nvml: Any, library: Any) -> list[tuple[str, list[Callable[..., Any]]]]:
    """(field of the row, functions of a handle that give it and what comes with it, the newest first) for everything
    that is read in every tick. They call the library as pynvml does, with its structs, but into memory that is kept:
    half the time of pynvml's own functions."""

    def reader(symbol: str, out: Any, take: Callable[[Any], dict[str, Any]], *args: int) -> list[Callable[..., Any]]:
        function = getattr(library, symbol, None)
        if function is None:
            return []
        target = ctypes.byref(out)

        def read(handle: Any) -> dict[str, Any]:
            code = function(handle, *args, target)
            if code:
                raise nvml.NVMLError(code)
            return take(out)

        return [read]

    def number(name: str, factor: float) -> Callable[[Any], dict[str, Any]]:
        return lambda out: {name: round(out.value * factor, 3)}

    def throttle(out: Any) -> dict[str, Any]:
        return {"throttle": parse_throttle(out.value)}

    def memory(out: Any) -> dict[str, Any]:
        return {"memory_used_bytes": out.used, "memory_total_bytes": out.total}

    degrees = number("temperature_c", 1.0)
    temperatures = reader("nvmlDeviceGetTemperature", ctypes.c_uint(), degrees, nvml.NVML_TEMPERATURE_GPU)
    if hasattr(nvml, "c_nvmlTemperature_v1_t"):
        newer = nvml.c_nvmlTemperature_v1_t(version=nvml.nvmlTemperature_v1, sensorType=nvml.NVML_TEMPERATURE_GPU)
        taken = reader("nvmlDeviceGetTemperatureV", newer, lambda out: {"temperature_c": float(out.temperature)})
        temperatures = [*taken, *temperatures]
    clock_hz, mask = number("sm_clock_hz", 1e6), ctypes.c_ulonglong()
    return [
        (
            "utilization_ratio",
            reader(
                "nvmlDeviceGetUtilizationRates",
                nvml.c_nvmlUtilization_t(),
                lambda out: {"utilization_ratio": out.gpu / 100},
            ),
        ),
        ("sm_clock_hz", reader("nvmlDeviceGetClockInfo", ctypes.c_uint(), clock_hz, nvml.NVML_CLOCK_SM)),
        ("power_w", reader("nvmlDeviceGetPowerUsage", ctypes.c_uint(), number("power_w", 1e-3))),
        ("temperature_c", temperatures),
        ("memory_used_bytes", reader("nvmlDeviceGetMemoryInfo", nvml.c_nvmlMemory_t(), memory)),
        (
            "throttle",
            [
                *reader("nvmlDeviceGetCurrentClocksEventReasons", mask, throttle),
                *reader("nvmlDeviceGetCurrentClocksThrottleReasons", mask, throttle),
            ],
        ),
    ]
