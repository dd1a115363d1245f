"""NVML, in a child of its own: any of its calls may take seconds, or never return while a GPU is in trouble.

Nothing here is imported by the agent's loop but through the table of tasks. The child keeps one NVML session, and in it
an event set for faults. What changes quickly is read in every tick (nvml_values), what is dear or slow of one GPU a
tick: a list of processes takes about 4.5 ms a GPU under the driver's global lock, in which training may wait, while
utilisation takes 2.5 us and memory 12 us.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import GpuReading
from slurm_watchdog.agent.children.requests import ReadGpus, WorkerState
from slurm_watchdog.agent.gpu.nvml_values import (
    HEALTH,
    LIST,
    OTHER_TICK,
    TICK,
    VALUES,
    WHO,
    Library,
    Value,
    address_of,
    name_error,
)
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import Gpu

MAX_GPUS = 64  # More of one node are not read, whatever the driver counts.
RENEW_S = 300.0  # A GPU that is lost may come back, but only to a new session, which is dear and costs its events.
TURN_S = 60.0  # What is read in turn is read of one GPU no more often, unless someone is under suspicion.


@dataclass
class Kept:
    """What a GPU said last, nothing if it does not answer, and when it had its turns."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    turns: dict[str, float] = field(default_factory=dict)


@dataclass
class NvmlMemory:
    """The child's session, None before the first request and after a failure."""

    session: Session | None = None
    kept: dict[str, Kept] = field(default_factory=dict)  # By UUID.


def read_gpus(request: ReadGpus, worker: WorkerState) -> GpuReading:
    """Every GPU with the newest of each value, None where it has none."""
    import pynvml

    memory = worker.memory(NvmlMemory)
    try:
        if memory.session is None or memory.session.has_ended(request.now):
            memory.session = Session(pynvml, memory.kept)
        return memory.session.read(request)
    except pynvml.NVMLError as error:
        memory.session = None
        why = name_error(pynvml, error)
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return GpuReading(missing=why)
        return GpuReading(error=why)


class Session:
    """One NVML session: from nvmlInit until the child ends, NVML as a whole refuses, or a GPU was missing for long."""

    def __init__(self, nvml: Any, kept: dict[str, Kept]):
        """Raises NVMLError, as `read` does."""
        self.ask, self.kept, self.devices = Library(nvml), kept, dict[int, tuple[Any, Gpu]]()
        self._count, self._tick = -1, 0
        self._incomplete_since: float | None = None
        self.ask("nvmlInit")
        self._events = EventSet(self.ask)

    def has_ended(self, now: float) -> bool:
        """Ends it where GPUs have been missing for RENEW_S: they are found by a new one alone."""
        if self._incomplete_since is None or now - self._incomplete_since < RENEW_S:
            return False
        with suppress(self.ask.error):
            self.ask("nvmlShutdown")
        return True

    def read(self, request: ReadGpus) -> GpuReading:
        """One answer, see read_gpus."""
        self.ask.seconds, self._tick = 0.0, self._tick + 1
        count = min(self.ask("nvmlDeviceGetCount"), MAX_GPUS)
        if count != self._count:
            self.devices.clear()
            self._count = count
        refused = {index: self._identify(index) for index in range(count) if index not in self.devices}
        turns = {what: self._whose_turn(what, request.now) for what in (LIST, HEALTH)}
        rows = []
        for index in range(count):
            wanted = {TICK, *(what for what, turn in turns.items() if turn == index)}
            if request.everything or (index + self._tick) % 2 == 0:
                wanted |= {OTHER_TICK, LIST, HEALTH} if request.everything else {OTHER_TICK}
            rows.append(self._row(index, wanted, request.now, refused.get(index)))
        if not request.missed and all(row.uuid and self.kept[row.uuid].values for row in rows):
            self._incomplete_since = None
        elif self._incomplete_since is None:
            self._incomplete_since = request.now
        events = self._events.drain((handle, identity.uuid) for handle, identity in self.devices.values())
        return GpuReading(gpus=tuple(rows), events=tuple(events), driver_s=self.ask.seconds)

    def _identify(self, index: int) -> str | None:
        """Finds out who is at this place; else why it does not say."""
        ask = self.ask
        try:
            handle = ask("nvmlDeviceGetHandleByIndex", index)
            found: dict[str, Any] = {"index": index, "uuid": ask("nvmlDeviceGetUUID", handle)}
            for name, read in WHO.items():
                try:
                    found[name] = read(ask, handle)
                except ask.error as error:
                    if error.value in ask.fatal:
                        raise
        except ask.error as error:
            return name_error(ask.nvml, error)
        self.devices[index] = handle, Gpu(**found)
        return None

    def _whose_turn(self, what: str, now: float) -> int | None:
        """Who waits longest for it, if that is for TURN_S."""
        never = Kept()
        turns = [
            (self.kept.get(identity.uuid, never).turns.get(what, float("-inf")), index)
            for index, (_, identity) in self.devices.items()
        ]
        at, index = min(turns, default=(now, -1))
        return index if now - at >= TURN_S else None

    def _row(self, index: int, wanted: set[str], now: float, refused: str | None) -> Gpu:
        """One GPU. Who it is remains known while it does not answer: a handle stays with its GPU."""
        if index not in self.devices:
            return Gpu(uuid="", index=index, error=refused)
        ask, (handle, identity) = self.ask, self.devices[index]
        kept = self.kept.setdefault(identity.uuid, Kept())
        kept.turns |= dict.fromkeys(wanted, now)
        try:
            if HEALTH in wanted and ask("nvmlDeviceGetUUID", ask("nvmlDeviceGetHandleByIndex", index)) != identity.uuid:
                self._count = -1  # another one is there now: all are asked who they are in the next tick
            for value in VALUES:
                if value.how_often in wanted or (value.how_often == OTHER_TICK and value.fields[0] not in kept.values):
                    self._read(value, handle, kept)
        except ask.error as error:  # nothing of what it said before is said of it any more
            self.kept[identity.uuid] = Kept(turns=dict.fromkeys((LIST, HEALTH), now - TURN_S))
            return replace(identity, error=name_error(ask.nvml, error))
        return replace(identity, error=next(iter(kept.errors.values()), None), **kept.values)

    def _read(self, value: Value, handle: Any, kept: Kept) -> None:
        values, error = [None] * len(value.fields), None
        try:
            values = value.read(self.ask, handle)
        except self.ask.error as problem:
            if problem.value in self.ask.fatal:
                raise
            if value.how_often != HEALTH and problem.value not in self.ask.absent:
                error = f"{value.fields[0]}: {name_error(self.ask.nvml, problem)}"
        kept.values |= zip(value.fields, values, strict=True)
        kept.errors.pop(value.fields[0], None)
        if error is not None:
            kept.errors[value.fields[0]] = error


# -- events --------------------------------------------------------------------------------------------------------

MAX_EVENTS = 32  # Taken in one tick. A GPU in trouble may announce hundreds a second; the others wait in the driver.
RENEW_EVENTS_S = 60.0  # A set that keeps failing is replaced no more often than this.


class EventSet:
    """The faults that the GPUs of one session announce: each is delivered once to each set that was made before it
    happened. A second witness beside the kernel's log: some drivers announce 79, 119 and 120 to no one
    (NVIDIA/DCGM#162). Nothing here raises NVMLError: without events, the values still count."""

    def __init__(self, ask: Library):
        self._ask, self._failed, self._renew_at = ask, False, float("-inf")
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        """Address of the handle -> UUID, of each GPU in the set; one that fell off the bus can't be asked who it is."""
        self._types = ask.nvml.nvmlEventTypeXidCriticalError | ask.nvml.nvmlEventTypeDoubleBitEccError

    def drain(self, devices: Iterable[tuple[Any, str]]) -> list[tuple[int, int, str | None]]:
        """(type, data, UUID) of what happened since the last call on GPUs, given as (handle, UUID)."""
        ask, nvml = self._ask, self._ask.nvml
        events: list[tuple[int, int, str | None]] = []
        try:
            if self._set is None:
                if clock.monotonic() < self._renew_at:
                    return []
                self._renew_at = clock.monotonic() + RENEW_EVENTS_S
                self._set = ask("nvmlEventSetCreate")
            for handle, uuid in devices:
                self._register(handle, uuid)
            for _ in range(MAX_EVENTS):
                event = ask("nvmlEventSetWait_v2", self._set, 0)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError and not event.eventData:
                    continue  # drivers do announce a fault without a number: it says nothing
                events.append((event.eventType, event.eventData, self._uuid_of(event.device)))
        except ask.error as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                self._failed = False
            else:
                self._drop()
        return events

    def _register(self, handle: Any, uuid: str) -> None:
        """Once for each GPU and set. One that has no events, or is lost, is left out."""
        address = address_of(handle)
        if self._uuids.get(address) == uuid:
            return
        try:
            types = self._types & self._ask("nvmlDeviceGetSupportedEventTypes", handle)
            if types:
                self._ask("nvmlDeviceRegisterEvents", handle, types, self._set)
        except self._ask.error as error:
            if error.value not in self._ask.absent:
                return  # another time
        self._uuids[address] = uuid

    def _uuid_of(self, handle: Any) -> str | None:
        try:
            return self._uuids.get(address_of(handle)) or self._ask("nvmlDeviceGetUUID", handle)
        except self._ask.error:
            return None

    def _drop(self) -> None:
        """Makes room for a new set: at once after the first failure, for then it has only GPUs that still answer."""
        if not self._failed:
            self._renew_at = float("-inf")
        self._failed = True
        self._uuids.clear()
        if self._set is not None:
            with suppress(self._ask.error):
                self._ask("nvmlEventSetFree", self._set)
        self._set = None
