"""Faults that NVML announces, read in the NVML child: an event set, asked without waiting in every tick.

An event is delivered once to each set that was made before it happened: what falls between two sessions is only in the
kernel's log. So are the faults that some drivers announce to no one (79, 119 and 120, says NVIDIA/DCGM#162): this is a
second witness.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from slurm_watchdog.base import clock

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
