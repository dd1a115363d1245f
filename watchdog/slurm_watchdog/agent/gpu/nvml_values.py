"""What is read of one GPU, and how often: `VALUES`, a row for each group of fields that are read together.

Read with pynvml in the NVML child. What a GPU, a driver or a hypervisor does not offer, or refuses, is None.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import MigInstance

MAX_LISTED = 4096  # Processes of one GPU; far more than a driver has contexts for.
MAX_MIG_DEVICES = 16  # NVIDIA's largest number is 7 a GPU; a driver that says more is not believed.

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


class Library:
    """pynvml, with the time that was spent inside NVML. Everything here raises NVMLError."""

    def __init__(self, nvml: Any):
        self.nvml, self.error, self.seconds, self._room = nvml, nvml.NVMLError, 0.0, 64
        self.samples: dict[int, list[Any]] = {}  # Of the activity of each GPU, the newest last.
        self.absent = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        self.fatal = {
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }
        """Errors that concern the whole GPU, or the whole session."""

    def __call__(self, function: Any, *args: Any) -> Any:
        """Calls a function of pynvml by its name, or one of the library itself."""
        if isinstance(function, str):
            function = getattr(self.nvml, function, None)
        if function is None:
            raise self.error(self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        began = clock.monotonic()
        try:
            return function(*args)
        finally:
            self.seconds += clock.monotonic() - began

    def first(self, *ways: Callable[[], Any]) -> Any:
        """By the first of these ways, the newest first, that this driver has."""
        for way in ways[:-1]:
            try:
                return way()
            except self.error as error:
                if error.value != self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise
        return ways[-1]()

    def list_processes(self, version: str, handle: Any) -> list[tuple[int, int | None]]:
        """(pid, bytes) of those that compute. Those that only draw are left out: to list them, too, would double the
        time under the driver's lock. pynvml asks twice for a list, once for its length: we ask once, with room for
        all."""
        nvml = self.nvml
        function = getattr(nvml.nvmlLib, f"nvmlDeviceGetComputeRunningProcesses_{version}", None)
        while True:
            count = ctypes.c_uint(self._room)
            rows = (nvml.c_nvmlProcessInfo_v3_t * self._room)()  # the same layout as v2's
            code = self(function, handle, ctypes.byref(count), rows)
            if code != nvml.NVML_ERROR_INSUFFICIENT_SIZE or self._room >= MAX_LISTED:
                break
            self._room = min(2 * max(count.value, self._room), MAX_LISTED)
        if code != nvml.NVML_SUCCESS:
            raise self.error(code)
        unknown = nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
        listed = rows[: min(count.value, self._room)]
        return [(row.pid, None if row.usedGpuMemory == unknown else row.usedGpuMemory) for row in listed]


def name_error(nvml: Any, error: Any) -> str:
    """`NVML_ERROR_GPU_IS_LOST: GPU is lost`: the name, which people search for, and NVML's own words."""
    names = [name for name in dir(nvml) if name.startswith("NVML_ERROR_") and getattr(nvml, name) == error.value]
    return f"{names[0] if names else f'NVML error {error.value}'}: {error}"


# -- what is read --------------------------------------------------------------------------------------------------

Read = Callable[[Library, Any], list[Any]]


def _number(function: str, unit: float = 1, *constants: str) -> Read:
    """Reads one number by one function of pynvml, which is given these constants."""
    return lambda ask, handle: [ask(function, handle, *(getattr(ask.nvml, name) for name in constants)) * unit]


def by_pid(listed: Iterable[tuple[int, int | None]]) -> dict[int, int | None]:
    """Bytes by pid; a pid that is listed twice (MIG) holds the sum."""
    held: dict[int, int | None] = {}
    for pid, used in sorted(listed, key=lambda row: row[0]):
        held[pid] = (held.get(pid) or 0) + used if used is not None else held.get(pid)
    return held


def _read_processes(ask: Library, handle: Any) -> list[Any]:
    held = by_pid(ask.first(*(partial(ask.list_processes, version, handle) for version in ("v3", "v2"))))
    return [tuple(held), tuple(held.values())]


def _read_temperature(ask: Library, handle: Any) -> list[Any]:
    names = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    return [float(ask.first(*(partial(ask, name, handle, ask.nvml.NVML_TEMPERATURE_GPU) for name in names)))]


def _read_throttle(ask: Library, handle: Any) -> list[Any]:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    return [parse_throttle(ask.first(*(partial(ask, name, handle) for name in names)))]


def _read_memory(ask: Library, handle: Any) -> list[Any]:
    found = ask("nvmlDeviceGetMemoryInfo", handle)
    return [found.used, found.total]


def _read_ecc(ask: Library, handle: Any) -> list[Any]:
    nvml = ask.nvml
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    return [ask("nvmlDeviceGetTotalEccErrors", handle, kind, nvml.NVML_VOLATILE_ECC) for kind in kinds]


def _read_remapped(ask: Library, handle: Any) -> list[Any]:
    corrected, uncorrected, pending, failed = ask("nvmlDeviceGetRemappedRows", handle)
    return [corrected, uncorrected, bool(pending), bool(failed)]


def _read_retired(ask: Library, handle: Any) -> list[Any]:
    causes = (
        ask.nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        ask.nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    pages = sum(len(ask("nvmlDeviceGetRetiredPages", handle, cause)) for cause in causes)
    return [pages, bool(ask("nvmlDeviceGetRetiredPagesPendingStatus", handle))]


def _read_links(ask: Library, handle: Any) -> list[Any]:
    """Links that are active, links that are not, errors of all links; Nones on a GPU without NVLink."""
    nvml = ask.nvml
    links: dict[int, bool] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            links[link] = bool(ask("nvmlDeviceGetNvLinkState", handle, link))
        except ask.error as error:
            if error.value == nvml.NVML_ERROR_INVALID_ARGUMENT:
                break  # there are no more
            if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
            if link == 0:
                break
    if not links:
        return [None, None, None]
    active = sum(links.values())
    return [active, len(links) - active, _read_link_errors(ask, handle, list(links))]


def _read_link_errors(ask: Library, handle: Any, links: list[int]) -> int | None:
    """All errors of all links: by the first way of asking that this GPU knows; None if it knows none (Blackwell). Up to
    Ampere there are totals, Hopper has a counter for each link."""
    nvml = ask.nvml
    totals = ("CRC_FLIT_ERROR_COUNT_TOTAL", "CRC_DATA_ERROR_COUNT_TOTAL", "REPLAY_ERROR_COUNT_TOTAL",
              "RECOVERY_ERROR_COUNT_TOTAL")  # fmt: skip
    of_each = [getattr(nvml, f"NVML_FI_DEV_NVLINK_ERROR_DL_{name}") for name in ("REPLAY", "RECOVERY", "CRC")]
    for fields in (
        [getattr(nvml, f"NVML_FI_DEV_NVLINK_{name}") for name in totals],
        [(kind, link) for link in links for kind in of_each],
    ):
        try:
            values = ask("nvmlDeviceGetFieldValues", handle, fields)
        except ask.error as error:
            if error.value not in {*ask.absent, nvml.NVML_ERROR_INVALID_ARGUMENT}:
                raise
            continue
        small = nvml.NVML_VALUE_TYPE_UNSIGNED_INT
        known = [each for each in values if each.nvmlReturn == nvml.NVML_SUCCESS]
        if known:
            return sum(int(each.value.uiVal if each.valueType == small else each.value.ullVal) for each in known)
    return None


def _read_mig(ask: Library, handle: Any) -> list[Any]:
    """The MIG devices; None where MIG is off."""
    nvml = ask.nvml
    current, _ = ask("nvmlDeviceGetMigMode", handle)
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return [None]
    instances = []
    for index in range(min(ask("nvmlDeviceGetMaxMigDeviceCount", handle), MAX_MIG_DEVICES)):
        try:
            device = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            used, total = _read_memory(ask, device)
            instances.append(
                MigInstance(
                    uuid=ask("nvmlDeviceGetUUID", device),
                    gpu_instance=ask("nvmlDeviceGetGpuInstanceId", device),
                    compute_instance=ask("nvmlDeviceGetComputeInstanceId", device),
                    memory_used_bytes=used,
                    memory_total_bytes=total,
                )
            )
        except ask.error as error:
            if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
    return [tuple(instances)]


MIB = 2.0**20
ACTIVITY: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("sm_active_ratio", ("SM_UTIL",), 0.01),
    ("tensor_active_ratio", ("ANY_TENSOR_UTIL",), 0.01),
    ("dram_active_ratio", ("DRAM_BW_UTIL",), 0.01),
    ("nvlink_bytes_s", ("NVLINK_TOTAL_RX_PER_SEC", "NVLINK_TOTAL_TX_PER_SEC"), MIB),
    ("pcie_bytes_s", ("PCIE_RX_PER_SEC", "PCIE_TX_PER_SEC"), MIB),
)
"""How much of a GPU works, by NVML's GPM (Hopper and later): utilisation is 100 % also while one small kernel spins in
a collective. Field, metrics whose sum it is, their unit: per cent, MiB a second (nvmlGpmMetricId_t)."""


def _read_activity(ask: Library, handle: Any) -> list[Any]:
    """The average since the turn before; Nones at first."""
    nvml = ask.nvml
    if not ask("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
        return [None] * len(ACTIVITY)
    samples = ask.samples.setdefault(address_of(handle), [])
    sample = samples[0] if len(samples) == 2 else ask("nvmlGpmSampleAlloc")
    ask("nvmlGpmSampleGet", handle, sample)
    samples[:] = [*samples[-1:], sample]
    if len(samples) < 2:
        return [None] * len(ACTIVITY)
    wanted = [name for _, names, _ in ACTIVITY for name in names]
    asked = nvml.c_nvmlGpmMetricsGet_t(
        version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(wanted), sample1=samples[0], sample2=sample
    )
    for metric, name in zip(asked.metrics, wanted, strict=False):
        metric.metricId = getattr(nvml, f"NVML_GPM_METRIC_{name}")
    ask("nvmlGpmMetricsGet", asked)
    told = {
        name: metric.value
        for name, metric in zip(wanted, asked.metrics, strict=False)
        if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value) and metric.value >= 0
    }
    return [
        sum(told[name] for name in names) * unit if told.keys() >= set(names) else None for _, names, unit in ACTIVITY
    ]


TICK, OTHER_TICK, LIST, HEALTH = "every tick", "every other tick", "list", "health"
"""How often: of every GPU; of half of the GPUs, for it changes slowly; the last two of one GPU a tick, each in turn."""


class Value(NamedTuple):
    """Fields of a Gpu that are read together: what one refuses leaves the others alone."""

    how_often: str
    fields: tuple[str, ...]
    read: Read


VALUES = (
    Value(TICK, ("utilization_ratio",), lambda ask, handle: [ask("nvmlDeviceGetUtilizationRates", handle).gpu / 100]),
    Value(TICK, ("sm_clock_hz",), _number("nvmlDeviceGetClockInfo", 1e6, "NVML_CLOCK_SM")),
    Value(TICK, ("power_w",), _number("nvmlDeviceGetPowerUsage", 1e-3)),
    Value(OTHER_TICK, ("temperature_c",), _read_temperature),
    Value(OTHER_TICK, ("memory_used_bytes", "memory_total_bytes"), _read_memory),
    Value(OTHER_TICK, ("throttle",), _read_throttle),
    Value(LIST, ("pids", "process_memory_bytes"), _read_processes),
    Value(HEALTH, ("memory_clock_hz",), _number("nvmlDeviceGetClockInfo", 1e6, "NVML_CLOCK_MEM")),
    Value(HEALTH, ("ecc_corrected", "ecc_uncorrected"), _read_ecc),
    Value(
        HEALTH,
        ("remapped_rows_corrected", "remapped_rows_uncorrected", "remap_pending", "remap_failed"),
        _read_remapped,
    ),
    Value(HEALTH, ("retired_pages", "retired_pages_pending"), _read_retired),
    Value(HEALTH, ("pcie_link_width",), _number("nvmlDeviceGetCurrPcieLinkWidth")),
    Value(HEALTH, ("pcie_link_width_max",), _number("nvmlDeviceGetMaxPcieLinkWidth")),
    Value(HEALTH, ("pcie_link_generation",), _number("nvmlDeviceGetCurrPcieLinkGeneration")),
    Value(HEALTH, ("pcie_link_generation_max",), _number("nvmlDeviceGetMaxPcieLinkGeneration")),
    Value(HEALTH, ("pcie_replays",), _number("nvmlDeviceGetPcieReplayCounter")),
    Value(HEALTH, ("nvlinks_active", "nvlinks_down", "nvlink_errors"), _read_links),
    Value(HEALTH, ("mig",), _read_mig),
    Value(HEALTH, tuple(name for name, _, _ in ACTIVITY), _read_activity),
)
WHO: dict[str, Callable[[Library, Any], Any]] = {
    "pci_bus_id": lambda ask, handle: parse_bus_id(ask("nvmlDeviceGetPciInfo", handle).busId),
    "minor": lambda ask, handle: ask("nvmlDeviceGetMinorNumber", handle),
    "name": lambda ask, handle: ask("nvmlDeviceGetName", handle),
}
"""What is read once, beside the UUID."""


def address_of(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
