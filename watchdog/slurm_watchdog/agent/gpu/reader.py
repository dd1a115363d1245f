"""The GPUs of this node, in every tick, as the `nvml` child reads them.

The loop itself never calls NVML. While the child does not answer, each GPU that is known is a row without
values and with the reason; a node without driver has no rows, and says so once in the log. What is dear is
asked for in turn (see slurm_watchdog.agent.gpu.nvml) and said again in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import GpuHealthRow, GpuProcesses, GpuReading, GpuRow
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.look import STARVED, STOPPED
from slurm_watchdog.agent.children.requests import ReadGpus
from slurm_watchdog.agent.gpu.nvml import HEALTH, PROCESSES
from slurm_watchdog.base.structs import only, picked
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.observations import FaultSeverity, Gpu, NodeEvent

MAX_LINE = 200  # Characters of an event's line.


def make_gpu(row: GpuRow) -> Gpu:
    """One GPU from the row that the child read in this tick, with its newest processes and health."""
    more = msgspec.structs.asdict(row.health) if isinstance(row.health, GpuHealthRow) else {}
    if isinstance(row.processes, tuple):
        held = _by_pid(row.processes)
        more |= {"pids": tuple(held), "process_memory_bytes": tuple(held.values())}
    return replace(only(Gpu, row), **more)


def _by_pid(processes: GpuProcesses) -> dict[int, int | None]:
    """Bytes by pid; a pid that is listed twice (MIG) holds the sum."""
    held: dict[int, int | None] = {}
    for pid, used in sorted(processes, key=lambda row: row[0]):
        held[pid] = (held.get(pid) or 0) + used if used is not None else held.get(pid)
    return held


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


log = logging.getLogger(__name__)

KEY = "nvml"
DEAR_EVERY_S = 60.0  # Processes and health of one GPU are read no more often, unless someone is under suspicion.
DRIVER_BUDGET_S = 0.005  # Driver time that a tick may cost: the driver's global lock, in which training may wait.
SUSPECT_EVERY_S = 20.0  # Ranks that block one after the other cause no more lists than this.
RENEW_S = 300.0  # A GPU that is lost may come back, but only to a new session, which is dear and costs its events.
RETRY_S = 60.0
RETRY_MISSING_S = 600.0  # Until a driver is installed, a child that looks for it costs too much.
SETTLE_S = 0.1  # The loop gives the child this long, at the end of its tick. It never waits for more.
MAX_KNOWN = 128  # GPUs that are remembered, those that are gone included.
MAX_EVENTS = 64  # Kept until the next report, equal ones folded: a GPU in trouble may announce hundreds a second.


class GpuReader(msgspec.Struct):
    """Asks the child in every tick and remembers which GPUs there are."""

    probes: Children
    problem: str | None = None
    """Why NVML as a whole says nothing on a node that should have it; None where it works or there is no driver."""
    driver_s: float | None = None  # Seconds that the last report's answer spent inside NVML; None without one.
    max_known: int = MAX_KNOWN
    events_dropped: int = 0  # Events that were too many for one report: counted by the last drain_events.
    _known: dict[str, Gpu] = {}  # UUID -> the GPU without values, since the agent started.
    _slow: dict[str, GpuRow] = {}  # By UUID, with the newest processes and health.
    _read_at: dict[tuple[int, str], float] = {}  # (index, PROCESSES or HEALTH) -> when it was last read.
    _rows: int = 0  # How many GPUs NVML listed last.
    _fresh: tuple[Gpu, ...] | None = None  # What came since the last report.
    _events: dict[tuple[int, int, str | None], tuple[float, int]] = {}
    """(type, data, UUID) -> when it was first seen, and how often since the last report."""
    _dropped: int = 0
    _request: int | None = None
    _asked_at: float = 0.0
    _list_all: bool = False  # The next request lists the processes of every GPU.
    _suspects: set[int] = set()  # Blocked ranks for which everybody was listed already, in vain.
    _suspected_at: float = float("-inf")
    _renew_at: float | None = None
    _retry_at: float = float("-inf")
    _silent: str = ""  # Why nothing is being asked at the moment.

    def want_processes(self) -> None:
        """The next request lists the processes of every GPU: there is a suspicion, or a person waits."""
        self._list_all = True

    def suspect(self, pids: Iterable[int], now: float) -> None:
        """Ranks that are blocked now: if one of them is new and in no list yet, the next request lists everybody, too.
        A job that has just begun is not listed for a minute; a stall in that minute is to be reported with its GPU."""
        named = {pid for row in self._slow.values() for pid, _ in row.processes or ()}
        new = set(pids) - named
        if new - self._suspects and now - self._suspected_at >= SUSPECT_EVERY_S:
            self._list_all, self._suspected_at, self._suspects = True, now, new
        else:
            self._suspects &= new

    def ask(self, now: float, deadline_s: float) -> None:
        """Gives the child its work for this tick, unless it is still at an older one."""
        if now < self._retry_at:
            return
        request = ReadGpus("all" if self._list_all else self._due(now), DRIVER_BUDGET_S)
        number = self.probes.ask(KEY, request, deadline_s, now, self._apply)
        if number is not None:
            self._request, self._asked_at, self._list_all = number, now, False

    def _due(self, now: float) -> list[tuple[int, str]]:
        """Whose turn it is, the longest waiting first."""
        turns = [(index, what) for what in (PROCESSES, HEALTH) for index in range(self._rows)]
        waited = {turn: now - self._read_at.get(turn, float("-inf")) for turn in turns}
        return sorted((turn for turn in turns if waited[turn] >= DEAR_EVERY_S), key=lambda turn: -waited[turn])

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
        self.events_dropped, self._dropped = self._dropped, 0
        return events

    def _apply(self, answer: Answer[GpuReading]) -> None:
        self._request = None
        if answer.timed_out:
            return  # the pool says that it hangs, and collect() since when
        reading = answer.value or GpuReading()
        if reading.gpus is not None:
            self.driver_s = reading.driver_s
            self._apply_rows(reading.gpus)
            self._apply_events(reading.events)
            return
        why = answer.error or reading.error or reading.missing or "NVML gave no answer"
        if why != self._silent:
            log.info("no GPUs are watched on this node now: %s", why)
        self._silent = why
        self._renew()
        if reading.missing and not self._known:
            self._retry_at = self._asked_at + RETRY_MISSING_S
        else:
            # Of a child that was stopped or starved, and is ended, the driver has said nothing: the next one
            # is asked at once.
            later_s = 0.0 if answer.error in (STOPPED, STARVED) else RETRY_S
            self._retry_at, self.problem = self._asked_at + later_s, why

    def _renew(self) -> None:
        """The next request finds a new child with a new session, which knows nothing of the old one's GPUs."""
        self.probes.retire(KEY)
        self._renew_at = None
        self._read_at.clear()

    def _apply_rows(self, rows: tuple[GpuRow, ...]) -> None:
        self.problem, self._silent, self._rows = None, "", len(rows)
        gpus: dict[str, Gpu] = {}
        nameless = []
        for row in rows:
            uuid = row.uuid
            if row.unreadable:
                self._forget(row.index, uuid)
            gpu = make_gpu(self._with_slow(row) if uuid else row)
            if not uuid:
                nameless.append(gpu)
            elif uuid not in gpus:  # twice: the list changed while it was read; the first is as good as any
                gpus[uuid] = gpu
                self._known.pop(uuid, None)  # the last seen is the last in the dictionary
                self._known[uuid] = without_values(gpu, "")
        while len(self._known) > self.max_known:
            del self._known[next(iter(self._known))]
        found = [*gpus.values(), *(self._recognise(gpu, set(gpus)) for gpu in nameless)]
        found.sort(key=lambda gpu: gpu.index)
        present = {gpu.uuid for gpu in found}
        gone = [gpu for uuid, gpu in self._known.items() if uuid not in present]
        for gpu in gone:
            self._slow.pop(gpu.uuid, None)
        self._fresh = (*found, *(without_values(gpu, "NVML does not list this GPU any more") for gpu in gone))
        self._renew_if_needed(bool(gone) or any(row.unreadable for row in rows))

    def _with_slow(self, row: GpuRow) -> GpuRow:
        """The row, with what was read of this GPU in earlier ticks."""
        before = self._slow.get(row.uuid)
        for what in (PROCESSES, HEALTH):
            if getattr(row, what) is not UNSET:
                self._read_at[row.index, what] = self._asked_at
            elif before is not None:
                row = replace(row, **{what: getattr(before, what)})
        self._slow[row.uuid] = row
        return row

    def _forget(self, index: int, uuid: str) -> None:
        """Drops what a GPU said before it fell silent; all is read again when it answers."""
        self._slow.pop(uuid, None)
        for what in (PROCESSES, HEALTH):
            self._read_at[index, what] = self._asked_at - DEAR_EVERY_S

    def _renew_if_needed(self, incomplete: bool) -> None:
        if not incomplete:
            self._renew_at = None
        elif self._renew_at is None:
            self._renew_at = self._asked_at + RENEW_S
        elif self._asked_at >= self._renew_at:
            self._renew()

    def _recognise(self, gpu: Gpu, listed: set[str]) -> Gpu:
        """A GPU that does not even say who it is: the last that was at this index, unless that is elsewhere now."""
        for known in reversed(self._known.values()):
            if known.index == gpu.index and known.uuid not in listed:
                return without_values(known, gpu.error or "")
        return gpu

    def _apply_events(self, events: tuple[tuple[int, int, str | None], ...]) -> None:
        for kind, data, uuid in events:
            key = (kind, data, uuid)
            seen_at, times = self._events.get(key, (self._asked_at, 0))
            if times or len(self._events) < MAX_EVENTS:
                self._events[key] = (seen_at, times + 1)
            else:
                self._dropped += 1
