"""What the kernel's log says about this node: read in the loop, where it can't hang.

How far it was read is kept, with the boot it belongs to, in a small file that only a child touches: an agent that is
started again tells nothing twice and misses nothing.

Sees: faults of GPUs, disks, memory, network, filesystem clients, with the GPU, mount or server that is
    meant
From: `/dev/kmsg`
How often: every tick; 10,000 records read, equal ones folded, 256 reported; its position is kept with the
    boot's id
Never: lines that a program wrote there; of links of the network; of a device that the record is not about
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.collectors.collector import (
    Collector,
    CollectorContext,
    CollectorSpec,
    Family,
    Problem,
    Series,
)
from slurm_watchdog.agent.collectors.gpu import GPU
from slurm_watchdog.agent.proc.files import is_in_first_pid_namespace
from slurm_watchdog.agent.proc.kmsg import Deduplicator, KernelClock, Kmsg, KmsgFile, Reported
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import ReadState, WorkerState, WriteState
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent
from slurm_watchdog.model.report import GpuSection, KernelLogSection, Report
from slurm_watchdog.parse.kernel_log.file import parse_record, readable
from slurm_watchdog.parse.kernel_log.line import KernelFact, is_interesting, parse_message

MAX_STATE_BYTES = 4096


def read_state(request: ReadState, worker: WorkerState) -> str | None:
    """In a child: the text of the state file, bounded; None if there is none."""
    try:
        with open(request.path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_STATE_BYTES)
    except FileNotFoundError:
        return None


def write_state(request: WriteState, worker: WorkerState) -> None:
    """In a child: replaces the state file in one step, making its directory if need be."""
    path = Path(request.path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(request.text)
        file.flush()
        os.fsync(fd)
    temporary.replace(path)


def parse_state(text: str | None, boot_id: str) -> int | None:
    """The position in a state file; None if there is none, if it is another boot's, or if it is garbage."""
    try:
        value = msgspec.json.decode(text or "null")
        sequence = value["sequence"]
        matches = value["boot_id"] == boot_id
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError):
        return None
    is_position = isinstance(sequence, int) and not isinstance(sequence, bool) and 0 <= sequence < 2**63
    return sequence if matches and boot_id and is_position else None


log = logging.getLogger(__name__)

KEY = "state"
LINK = "link"
"""Lines about links of the network are not reported: a user makes interfaces of any name in a network namespace, and
takes them down. What links do is read in sysfs (slurm_watchdog.agent.collectors.link)."""
MAX_RECORDS = 10_000  # Read in one tick, at 2 to 4 us each; the rest waits in the kernel's ring for the next.
MAX_RECENT = 64
RECENT_S = 600.0
SAVE_EVERY_S = 10.0
SAVE_DULL_EVERY_S = 300.0
"""Where nothing was told, a position that is lost costs a second look at lines that concern no one; to keep
it costs a child each time."""
STATE_DEADLINE_S = 3.0  # So long the first read waits for the position: a frozen disk must not make the agent deaf.
SETTLE_S = 0.1


@lru_cache(maxsize=256)
def _parse(message: bytes, level: int, device: str) -> KernelFact | None:
    fact = parse_message(readable(message), level, device)
    return None if fact is None or fact.part == LINK else fact


class KernelLogReader:
    """The kernel's log from where the agent before this one left it."""

    def __init__(
        self,
        path: str,
        boot_id: str,
        state_file: str,
        probes: WorkerPool,
        facilities: frozenset[int] = frozenset({0}),
        open_device: Callable[[str], KmsgFile] = KmsgFile,
    ):
        """`facilities`: those that are believed, the kernel's (0) alone, for programs may write to /dev/kmsg, too."""
        self._kmsg = Kmsg(path, open_device)
        self._boot_id, self._state_file, self._probes = boot_id, state_file, probes
        self._priorities = frozenset(b"%d" % (facility << 3 | level) for facility in facilities for level in range(8))
        self._clock = KernelClock()
        self._restarts = 0
        self._drained_at: float | None = None
        self._asked_at: float | None = None
        self._position_known = not state_file
        self._backlog = True  # What is read now may be from before the first look: until the end was reached once.
        self._began_at: float | None = None
        self._saved: int | None = None
        self._saving: int | None = None
        self._request: int | None = None
        self._told = False
        self._saved_at = float("-inf")
        self._recent: deque[tuple[float, NodeEvent]] = deque(maxlen=MAX_RECENT)
        self._again = False
        self.state_problem: str | None = None
        """Why the position cannot be kept: after a restart, the ring is reported again, as a backlog."""

    @property
    def problem(self) -> str | None:
        """Why the log cannot be read now."""
        return self._kmsg.problem

    def collect(self, now: float) -> tuple[tuple[NodeEvent, ...], int]:
        """What happened since the last call, the oldest first, and how many records or events were lost or left out."""
        if not self._has_position(now):
            return (), 0
        if self._kmsg.restarts != self._restarts:  # another log, of another clock perhaps
            self._restarts = self._kmsg.restarts
            self._clock, self._drained_at, self._backlog, self._began_at = KernelClock(), None, True, None
        if self._began_at is None:
            self._began_at = now
        fold = Deduplicator()
        oldest = newest = b""
        for priority, sequence, newest in self._kmsg.read(now, MAX_RECORDS):
            oldest = oldest or newest
            if priority in self._priorities and is_interesting(newest[newest.find(b";") + 1 :]):
                _take(fold, sequence, newest)
        if oldest:
            low = float("-inf") if self._drained_at is None else self._drained_at - _time_us(oldest) / 1e6
            self._clock.learn(now, low, now - _time_us(newest) / 1e6)
        events = tuple(self._event(now, told) for told in sorted(fold.entries.values(), key=lambda told: told.sequence))
        if self._kmsg.drained:
            self._drained_at, self._backlog = now, False
        lost, self._kmsg.lost = self._kmsg.lost, 0
        past = self._past(now)
        self._told = self._told or bool(events)
        self._recent.extend((now, event) for event in events if event.severity is not FaultSeverity.INFO)
        self._save(now)
        return past + events, lost + fold.dropped

    def retell(self) -> None:
        """The next `collect` begins with the recent past: the controller has restarted and knows none of it."""
        self._again = True

    def close(self, now: float) -> None:
        """Keeps the position a last time, waiting a moment at most, and closes the device."""
        for _ in range(2):  # one may still be under way, of an older position
            if self._request is not None:
                self._probes.settle(5 * SETTLE_S, [self._request])
            self._saved_at = float("-inf")
            self._save(now)
        self._kmsg.close()

    def _event(self, now: float, told: Reported) -> NodeEvent:
        fact = told.fact
        age_s = self._clock.age_s(now, told.time_us)
        backlog = self._backlog and self._began_at is not None and age_s >= now - self._began_at
        return picked(
            NodeEvent, fact, source="kernel_log", age_s=age_s, line=fact.message,
            sequence=told.sequence, repeats=told.repeats, gpu_uuid=fact.gpu, backlog=backlog,
        )  # fmt: skip

    def _past(self, now: float) -> tuple[NodeEvent, ...]:
        while self._recent and now - self._recent[0][0] + self._recent[0][1].age_s > RECENT_S:
            self._recent.popleft()
        if not self._again:
            return ()
        self._again = False
        past = ((now - at + event.age_s, event) for at, event in self._recent)
        return tuple(replace(event, age_s=age_s) for age_s, event in past if age_s <= RECENT_S)

    # -- the position ------------------------------------------------------------------------------------------

    def _has_position(self, now: float) -> bool:
        """Whether it is known where to begin; asks for it once and waits a few seconds at most, over the ticks."""
        if self._position_known:
            return True
        if self._asked_at is None:
            self._asked_at = now
            request = self._probes.ask(
                KEY, ReadState(self._state_file), STATE_DEADLINE_S, now, self._apply_state, idle_s=0.0
            )
            if request is None:
                self._position_known = True
            else:
                self._probes.settle(SETTLE_S, [request])
        if not self._position_known and now - self._asked_at > STATE_DEADLINE_S:
            self._position_known = True
        return self._position_known

    def _apply_state(self, answer: Answer[str | None]) -> None:
        if self._position_known:
            return
        self._position_known = True
        self._say_state(answer.error)
        self._saved = self._kmsg.position = parse_state(answer.value, self._boot_id)
        self._backlog = self._saved is None

    def _save(self, now: float) -> None:
        position = self._kmsg.position
        due = now - self._saved_at >= (SAVE_EVERY_S if self._told else SAVE_DULL_EVERY_S)
        if not self._state_file or position is None or position == self._saved or not due:
            return
        text = msgspec.json.encode({"boot_id": self._boot_id, "sequence": position}).decode()
        request = WriteState(self._state_file, text)
        number = self._probes.ask(KEY, request, STATE_DEADLINE_S, now, self._apply_saved, idle_s=0.0)
        if number is not None:
            self._request, self._saved_at, self._saving, self._told = number, now, position, False

    def _apply_saved(self, answer: Answer[None]) -> None:
        self._request = None
        self._say_state(answer.error)
        if answer.error is None:
            self._saved = self._saving

    def _say_state(self, error: str | None) -> None:
        problem = f"{self._state_file}: {error}" if error else None
        if problem and problem != self.state_problem:
            log.warning("how far the kernel's log was read cannot be kept: %s", problem)
        self.state_problem = problem


def _take(fold: Deduplicator, sequence: int, data: bytes) -> None:
    record = parse_record(data)
    fact = _parse(record.message, record.level, record.device) if record is not None else None
    if record is not None and fact is not None:
        fold.add(fact, sequence, record.time_us)


def _time_us(data: bytes) -> int:
    record = parse_record(data)
    return record.time_us if record is not None else 0


# -- the collector -------------------------------------------------------------------------------------------------


class KernelLogCollector(Collector):
    """What the kernel logged, with the GPU that a line is about."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        settings, kept = context.settings, context.settings.state_directory and not context.once
        state_file = f"{settings.state_directory}/kernel-log.json" if kept else ""
        self._is_on = bool(settings.kernel_log)
        self.keeper = self._reader = KernelLogReader(
            settings.kernel_log, context.boot_id, state_file, context.workers, open_device=context.open_kernel_log
        )
        self._knows_pids = is_in_first_pid_namespace()

    def collect(self, now: float) -> KernelLogSection:
        """What happened since the last tick; a line that names a PCI address gets the UUID of the GPU there."""
        if not self._is_on:
            return KernelLogSection()
        events, lost = self._reader.collect(now)
        gpus = self.sections.of(GpuSection).gpus
        uuids = {gpu.pci_bus_id: gpu.uuid for gpu in gpus if gpu.pci_bus_id and gpu.uuid}
        named = (
            replace(event, gpu_uuid=uuids[event.pci_bus_id])
            if event.gpu_uuid is None and event.pci_bus_id in uuids
            else event
            for event in (events if self._knows_pids else (replace(event, pid=None) for event in events))
        )
        return KernelLogSection(node_events=tuple(named), node_events_dropped=lost)

    def problems(self, now: float) -> Iterator[Problem]:
        """Why the log cannot be read."""
        if self._reader.problem:
            yield Problem(self._reader.problem)


class NodeEventCounters:
    """What the kernel's log and NVML said about this node, since the agent started."""

    def __init__(self) -> None:
        self._events: Counter[tuple[str, str]] = Counter()
        self._dropped = 0
        self._xids: dict[tuple[str, int], Counter[str]] = {}
        self._gpu_of: dict[str, tuple[str, str]] = {}  # UUID, or PCI address, -> labels of the GPU.

    def update(self, report: Report) -> None:
        """Adds the events of one report; not those from before the agent's start."""
        self._dropped += report.node_events_dropped
        for event in report.node_events:
            if event.backlog:
                continue
            self._events[event.name, event.severity.value] += 1 + event.repeats
            if event.xid is not None:
                where = (event.gpu_uuid or event.pci_bus_id or "", event.xid)
                self._xids.setdefault(where, Counter())[event.source] += 1 + event.repeats

    def families(self, report: Report) -> Iterable[Family]:
        """Events by name, and Xids by GPU."""
        for gpu in report.gpus:
            labels = (gpu.uuid, str(gpu.index))
            self._gpu_of.update({gpu.uuid: labels, gpu.pci_bus_id or gpu.uuid: labels})
        text, events = "What the kernel's log and NVML report about this node.", sorted(self._events.items())
        yield Family("node_events_total", text, ("name", "severity"), events)
        text = "Of these, those that could not be read or sent."
        yield Family("node_events_dropped_total", text, (), [((), self._dropped)])
        yield Family("gpu_xid_total", "NVIDIA's numbers of faults.", (*GPU, "xid"), self._xid_series())

    def _xid_series(self) -> list[Series]:
        """The kernel's log and NVML report the same fault: the larger of the two counts holds."""
        totals: dict[tuple[str, ...], Counter[str]] = {}
        for (gpu, xid), by_source in list(self._xids.items()):
            key = (*self._gpu_of.get(gpu, (gpu, "")), str(xid))
            totals.setdefault(key, Counter()).update(by_source)
        return sorted((key, max(by_source.values())) for key, by_source in totals.items())


SPEC = CollectorSpec("kernel_log", KernelLogSection, KernelLogCollector, counters=NodeEventCounters)
