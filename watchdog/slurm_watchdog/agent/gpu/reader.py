"""The GPUs of this node, in every tick, as the `nvml` child reads them.

The loop itself never calls NVML. While the child does not answer, each GPU that is known is a row without
values and with the reason; a node without driver has no rows, and says so once in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from slurm_watchdog.agent.children.answers import GpuReading
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.look import STARVED, STOPPED
from slurm_watchdog.agent.children.requests import ReadGpus
from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.observations import FaultSeverity, Gpu, NodeEvent

MAX_LINE = 200  # Characters of an event's line.


XID_EVENT, ECC_EVENT = 0x8, 0x2  # nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError (nvml.h).


def parse_event(
    kind: int, data: int, gpu: Gpu | None, age_s: float, repeats: int = 0, uuid: str | None = None
) -> NodeEvent:
    """One event of NVML's set about `gpu` (None: not known which). `data` of an Xid event is its number."""
    name, xid, severity, may_exclude = f"nvml_event_{kind:#x}", None, FaultSeverity.WARNING, False
    line = f"NVML announced event {kind:#x} ({data})"
    if kind == XID_EVENT:
        row = describe_xid(data)
        name, xid, severity, may_exclude = "xid", data, row.severity, row.may_exclude_node
        line = f"NVML: Xid {data}, {row.name}: {row.text}"
    elif kind == ECC_EVENT:
        name, severity = "gpu_ecc_uncorrected", FaultSeverity.ERROR
        line = "NVML: a memory error that ECC could not correct"
    return NodeEvent(
        source="nvml",
        name=name,
        severity=severity,
        age_s=age_s,
        line=line[:MAX_LINE],
        repeats=repeats,
        xid=xid,
        gpu_uuid=gpu.uuid if gpu is not None else uuid,
        pci_bus_id=gpu.pci_bus_id if gpu is not None else None,
        may_exclude_node=may_exclude,
    )


def without_values(gpu: Gpu, error: str) -> Gpu:
    """Which GPU it is, and why there is nothing to say about it."""
    return picked(Gpu, gpu, "uuid", "index", "pci_bus_id", "minor", "name", error=error)


GONE = "NVML does not list this GPU any more"
log = logging.getLogger(__name__)

KEY = "nvml"
SUSPECT_EVERY_S = 20.0  # Ranks that block one after the other cause no more lists than this.
RETRY_S = 60.0
RETRY_MISSING_S = 600.0  # Until a driver is installed, a child that looks for it costs too much.
SETTLE_S = 0.1  # The loop gives the child this long, at the end of its tick. It never waits for more.
MAX_KNOWN = 128  # GPUs that are remembered, those that are gone included.


class GpuReader(msgspec.Struct):
    """Asks the child in every tick and remembers which GPUs there are."""

    probes: Children
    problem: str | None = None
    """Why NVML as a whole says nothing on a node that should have it; None where it works or there is no driver."""
    driver_s: float | None = None  # Seconds that the last report's answer spent inside NVML; None without one.
    max_known: int = MAX_KNOWN
    _known: dict[str, Gpu] = {}  # UUID -> the GPU without values, since the agent started, the last seen last.
    _listed: set[int] = set()  # Pids in the newest lists.
    _missed: bool = False
    _fresh: tuple[Gpu, ...] | None = None  # What came since the last report.
    _events: dict[tuple[int, int, str | None], tuple[float, int]] = {}
    """(type, data, UUID) -> when it was first seen, and how often since the last report."""
    _request: int | None = None
    _asked_at: float = 0.0
    _hurry: bool = False  # With the next request processes and health of every GPU are read.
    _suspects: set[int] = set()  # Blocked ranks for which everybody was listed already, in vain.
    _suspected_at: float = float("-inf")
    _retry_at: float = float("-inf")
    _silent: str = ""  # Why nothing is being asked at the moment.

    def want_processes(self) -> None:
        """The next request lists the processes of every GPU: there is a suspicion, or a person waits."""
        self._hurry = True

    def suspect(self, pids: Iterable[int], now: float) -> None:
        """Ranks that are blocked now: if one of them is new and in no list yet, the next request lists everybody, too.
        A job that has just begun is not listed for a minute; a stall in that minute is to be reported with its GPU."""
        new = set(pids) - self._listed
        if new - self._suspects and now - self._suspected_at >= SUSPECT_EVERY_S:
            self._hurry, self._suspected_at, self._suspects = True, now, new
        else:
            self._suspects &= new

    def ask(self, now: float, deadline_s: float) -> None:
        """Gives the child its work for this tick, unless it is still at an older one."""
        if now >= self._retry_at:
            request = ReadGpus(now, self._hurry, self._missed)
            number = self.probes.ask(KEY, request, deadline_s, now, self._apply)
            if number is not None:
                self._request, self._asked_at, self._hurry = number, now, False

    def settle(self, seconds: float) -> None:
        """Waits at most so long for the answer that is due."""
        if self._request is not None:
            self.probes.settle(seconds, [self._request])

    def waiting_s(self, now: float) -> float | None:
        """For how long NVML has not answered while no GPU is known that could have a row to say so; None if it has."""
        return None if self._known or self.probes.is_free(KEY) else now - self._asked_at

    def collect(self, now: float) -> tuple[Gpu, ...]:
        """Every GPU, in NVML's order, with what it said since the last call, or with the reason why it said nothing."""
        if self._fresh is None:
            self.settle(SETTLE_S)
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            return fresh
        self.driver_s = None
        why = self._silent or "NVML was not asked: too many children of the agent are busy"
        if not self.probes.is_free(KEY):
            why = f"NVML has not answered for {max(now - self._asked_at, SETTLE_S):.1f} s"
        return tuple(without_values(gpu, why) for gpu in self._known.values())

    def drain_events(self, now: float) -> tuple[NodeEvent, ...]:
        """What NVML announced since the last call, oldest first; equal events of one GPU are one, with `repeats`."""
        events = tuple(
            parse_event(kind, data, self._known.get(uuid or ""), max(now - seen_at, 0.0), times - 1, uuid)
            for (kind, data, uuid), (seen_at, times) in self._events.items()
        )
        self._events.clear()
        return events

    def _apply(self, answer: Answer[GpuReading]) -> None:
        self._request = None
        if answer.timed_out:
            return  # the pool says that it hangs, and collect() since when
        reading = answer.value or GpuReading()
        if reading.gpus is not None:
            self.problem, self._silent, self.driver_s = None, "", reading.driver_s
            self._apply_rows(reading.gpus)
            for event in reading.events:  # a few of each answer, and each report takes all: see nvml.MAX_EVENTS
                seen_at, times = self._events.get(event, (self._asked_at, 0))
                self._events[event] = (seen_at, times + 1)
            return
        why = answer.error or reading.error or reading.missing or "NVML gave no answer"
        if why != self._silent:
            log.info("no GPUs are watched on this node now: %s", why)
        self._silent = why
        self.probes.retire(KEY)
        if reading.missing and not self._known:
            self._retry_at = self._asked_at + RETRY_MISSING_S
        else:
            # Of a child that was stopped or starved, and is ended, the driver has said nothing: the next one
            # is asked at once.
            later_s = 0.0 if answer.error in (STOPPED, STARVED) else RETRY_S
            self._retry_at, self.problem = self._asked_at + later_s, why

    def _apply_rows(self, rows: tuple[Gpu, ...]) -> None:
        gpus: dict[str, Gpu] = {}
        for row in rows:
            if row.uuid and row.uuid not in gpus:  # twice: the list changed while it was read; one is as good
                gpus[row.uuid] = row
                self._known.pop(row.uuid, None)
                self._known[row.uuid] = without_values(row, "")
        while len(self._known) > self.max_known:
            del self._known[next(iter(self._known))]
        nameless = [self._recognise(row, set(gpus)) for row in rows if not row.uuid]
        found = sorted([*gpus.values(), *nameless], key=lambda gpu: gpu.index)
        gone = self._known.keys() - {gpu.uuid for gpu in found}
        missing = [without_values(gpu, GONE) for uuid, gpu in self._known.items() if uuid in gone]
        self._fresh, self._missed = (*found, *missing), bool(gone)
        self._listed = {pid for gpu in found for pid in gpu.pids or ()}

    def _recognise(self, gpu: Gpu, listed: set[str]) -> Gpu:
        """A GPU that does not even say who it is: the last that was at this index, unless that is elsewhere now."""
        for known in reversed(self._known.values()):
            if known.index == gpu.index and known.uuid not in listed:
                return without_values(known, gpu.error or "")
        return gpu
