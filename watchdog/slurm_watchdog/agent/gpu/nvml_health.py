"""How a GPU fares, and faults that NVML announces: read in the NVML child, in turn and in every tick.

Each value of health is a row of a table: name, and how it is read. What a GPU, a driver or a hypervisor does not offer,
or refuses, is left out. An event is delivered once to each set that was made before it happened: what falls between two
sessions is only in the kernel's log. So are the faults that some drivers announce to no one (79, 119 and 120, says
NVIDIA/DCGM#162): this is a second witness.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import GpuHealthRow
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import MigInstance

Timed = Callable[..., Any]  # Calls its first argument with the others, and counts the time.

MAX_MIG_DEVICES = 16  # NVIDIA's largest number is 7 a GPU; a driver that says more is not believed.


def read_health(nvml: Any, timed: Timed, handle: Any, fatal: set[int]) -> GpuHealthRow:
    """Everything slow about one GPU, without what it does not have. Raises NVMLError if its code is in `fatal`."""
    found = GpuHealthRow()
    for names, read in TABLE:
        try:
            values = read(nvml, timed, handle)
        except nvml.NVMLError as error:
            if error.value in fatal:
                raise
            continue
        found = replace(found, **dict(zip(names, values, strict=True)))
    return found


def _one(function: str) -> Callable[[Any, Timed, Any], list[Any]]:
    """Reads one number by one function of pynvml."""
    return lambda nvml, timed, handle: [timed(getattr(nvml, function), handle)]


def _read_memory_clock(nvml: Any, timed: Timed, handle: Any) -> list[Any]:
    return [timed(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM) * 1e6]


def _read_ecc(nvml: Any, timed: Timed, handle: Any) -> list[Any]:
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    return [timed(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC) for kind in kinds]


def _read_remapped(nvml: Any, timed: Timed, handle: Any) -> list[Any]:
    corrected, uncorrected, pending, failed = timed(nvml.nvmlDeviceGetRemappedRows, handle)
    return [corrected, uncorrected, bool(pending), bool(failed)]


def _read_retired(nvml: Any, timed: Timed, handle: Any) -> list[Any]:
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    pages = sum(len(timed(nvml.nvmlDeviceGetRetiredPages, handle, cause)) for cause in causes)
    return [pages, bool(timed(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle))]


def _read_links(nvml: Any, timed: Timed, handle: Any) -> list[Any]:
    """Links that are active, links that are not, errors of all links; Nones on a GPU without NVLink."""
    links: dict[int, bool] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            links[link] = bool(timed(nvml.nvmlDeviceGetNvLinkState, handle, link))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_INVALID_ARGUMENT:
                break  # there are no more
            if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
            if link == 0:
                break
    if not links:
        return [None, None, None]
    active = sum(links.values())
    return [active, len(links) - active, _read_link_errors(nvml, timed, handle, list(links))]


def _read_link_errors(nvml: Any, timed: Timed, handle: Any, links: list[int]) -> int | None:
    """All errors of all links: by the first way of asking that this GPU knows; None if it knows none (Blackwell). Up to
    Ampere there are totals, Hopper has a counter for each link."""
    totals = [
        nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    ]
    kinds = [
        nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
        nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
        nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    ]
    for fields in (totals, [(kind, link) for link in links for kind in kinds]):
        counts = list(_read_fields(nvml, timed, handle, fields))
        if counts:
            return sum(counts)
    return None


def _read_fields(nvml: Any, timed: Timed, handle: Any, fields: list[Any]) -> Iterator[int]:
    """The value of each field that the GPU has; nothing where it has not got the function."""
    try:
        values = timed(nvml.nvmlDeviceGetFieldValues, handle, fields)
    except nvml.NVMLError as error:
        none = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT)
        if error.value not in none:
            raise
        return
    for value in values:
        if value.nvmlReturn == nvml.NVML_SUCCESS:
            small = value.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT
            yield value.value.uiVal if small else value.value.ullVal


def _read_mig(nvml: Any, timed: Timed, handle: Any) -> list[Any]:
    """The MIG devices; None where MIG is off."""
    current, _ = timed(nvml.nvmlDeviceGetMigMode, handle)
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return [None]
    instances = []
    for index in range(min(timed(nvml.nvmlDeviceGetMaxMigDeviceCount, handle), MAX_MIG_DEVICES)):
        try:
            device = timed(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            memory = timed(nvml.nvmlDeviceGetMemoryInfo, device)
            instances.append(
                MigInstance(
                    uuid=timed(nvml.nvmlDeviceGetUUID, device),
                    gpu_instance=timed(nvml.nvmlDeviceGetGpuInstanceId, device),
                    compute_instance=timed(nvml.nvmlDeviceGetComputeInstanceId, device),
                    memory_used_bytes=memory.used,
                    memory_total_bytes=memory.total,
                )
            )
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
    return [tuple(instances)]


TABLE: tuple[tuple[tuple[str, ...], Callable[[Any, Timed, Any], list[Any]]], ...] = (
    (("memory_clock_hz",), _read_memory_clock),
    (("ecc_corrected", "ecc_uncorrected"), _read_ecc),
    (("remapped_rows_corrected", "remapped_rows_uncorrected", "remap_pending", "remap_failed"), _read_remapped),
    (("retired_pages", "retired_pages_pending"), _read_retired),
    (("pcie_link_width",), _one("nvmlDeviceGetCurrPcieLinkWidth")),
    (("pcie_link_width_max",), _one("nvmlDeviceGetMaxPcieLinkWidth")),
    (("pcie_link_generation",), _one("nvmlDeviceGetCurrPcieLinkGeneration")),
    (("pcie_link_generation_max",), _one("nvmlDeviceGetMaxPcieLinkGeneration")),
    (("pcie_replays",), _one("nvmlDeviceGetPcieReplayCounter")),
    (("nvlinks_active", "nvlinks_down", "nvlink_errors"), _read_links),
    (("mig",), _read_mig),
)
"""(names in the answer, how to read them all): what one row refuses leaves the others alone."""


MAX_EVENTS = 32  # Taken in one tick. A GPU in trouble may announce hundreds a second; the others wait in the driver.
RENEW_S = 60.0  # A set that keeps failing is replaced no more often than this.


class EventSet:
    """The events of all GPUs of one session. Nothing here raises NVMLError: without events, the values still count."""

    def __init__(self, nvml: Any, timed: Callable[..., Any]):
        self._nvml, self._timed = nvml, timed
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        """Address of the handle -> UUID, of each GPU in the set; one that fell off the bus can't be asked who it is."""
        self._renew_at = float("-inf")
        self._failed = False
        self._types = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError

    def drain_events(self, devices: Iterable[tuple[Any, str]]) -> list[tuple[int, int, str | None]]:
        """(type, data, UUID) of what happened since the last call on GPUs, given as (handle, UUID)."""
        nvml = self._nvml
        events: list[tuple[int, int, str | None]] = []
        try:
            if not self._ready():
                return []
            for handle, uuid in devices:
                self._register(handle, uuid)
            for _ in range(MAX_EVENTS):
                event = self._timed(nvml.nvmlEventSetWait_v2, self._set, 0)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError and not event.eventData:
                    continue  # drivers do announce a fault without a number: it says nothing
                events.append((event.eventType, event.eventData, self._uuid_of(event.device)))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                self._failed = False
            else:
                self._drop()
        return events

    def _ready(self) -> bool:
        if self._set is None:
            if clock.monotonic() < self._renew_at:
                return False
            self._renew_at = clock.monotonic() + RENEW_S
            self._set = self._timed(self._nvml.nvmlEventSetCreate)
        return True

    def _register(self, handle: Any, uuid: str) -> None:
        """Once for each GPU and set. One that has no events, or is lost, is left out."""
        nvml = self._nvml
        address = _address(handle)
        if self._uuids.get(address) == uuid:
            return
        try:
            types = self._types & self._timed(nvml.nvmlDeviceGetSupportedEventTypes, handle)
            if types:
                self._timed(nvml.nvmlDeviceRegisterEvents, handle, types, self._set)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return  # another time
        self._uuids[address] = uuid

    def _uuid_of(self, handle: Any) -> str | None:
        uuid = self._uuids.get(_address(handle))
        if uuid is None:
            try:
                uuid = self._timed(self._nvml.nvmlDeviceGetUUID, handle)
            except self._nvml.NVMLError:
                return None
        return uuid

    def _drop(self) -> None:
        """Makes room for a new set: at once after the first failure, for then it has only GPUs that still answer."""
        old, self._set = self._set, None
        self._uuids.clear()
        if not self._failed:
            self._renew_at = float("-inf")
        self._failed = True
        if old is not None:
            try:
                self._timed(self._nvml.nvmlEventSetFree, old)
            except self._nvml.NVMLError:
                return


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
