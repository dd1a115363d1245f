"""What the kernel's log says about this node: read in the loop, where it can't hang.

How far it was read is kept (slurm_watchdog.agent.memory): an agent that is started again tells nothing twice and misses
nothing.

Sees: faults of GPUs, disks, memory, network, filesystem clients, with the GPU, mount or server that is
    meant
From: `/dev/kmsg`
How often: every tick; 10,000 records read, equal ones folded, 256 reported; its position is kept with the
    boot's id
Never: lines that a program wrote there; of links of the network; of a device that the record is not about
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

from msgspec.structs import replace

from slurm_watchdog.agent.collectors.collector import (
    Collector,
    CollectorContext,
    CollectorSpec,
    Problem,
)
from slurm_watchdog.agent.proc.files import is_in_first_pid_namespace
from slurm_watchdog.agent.proc.kmsg import Deduplicator, KernelClock, Kmsg, KmsgFile, Reported
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent
from slurm_watchdog.model.report import GpuSection, KernelLogSection
from slurm_watchdog.parse.kernel_log.file import parse_record, readable
from slurm_watchdog.parse.kernel_log.line import KernelFact, is_interesting, parse_message

LINK = "link"
"""Lines about links of the network are not reported: a user makes interfaces of any name in a network namespace, and
takes them down. What links do is read in sysfs (slurm_watchdog.agent.collectors.link)."""
MAX_RECORDS = 10_000  # Read in one tick, at 2 to 4 us each; the rest waits in the kernel's ring for the next.
MAX_RECENT = 64
RECENT_S = 600.0


@lru_cache(maxsize=256)
def _parse(message: bytes, level: int, device: str) -> KernelFact | None:
    fact = parse_message(readable(message), level, device)
    return None if fact is None or fact.part == LINK else fact


class KernelLogReader:
    """The kernel's log from where the agent before this one left it."""

    def __init__(
        self,
        path: str,
        position: int | None = None,
        keep: Callable[[int, float], None] = lambda position, now: None,
        facilities: frozenset[int] = frozenset({0}),
        open_device: Callable[[str], KmsgFile] = KmsgFile,
        tail: deque[bytes] | None = None,
    ):
        """`position`: how far it was read before; `keep` is given a new one, and now. `facilities`: those that are
        believed, the kernel's (0) alone, for programs may write to /dev/kmsg, too. `tail` as in Kmsg."""
        self._kmsg = Kmsg(path, open_device, tail)
        self._kmsg.position = self._saved = position
        self._keep = keep
        self._priorities = frozenset(b"%d" % (facility << 3 | level) for facility in facilities for level in range(8))
        self._clock = KernelClock()
        self._restarts = 0
        self._drained_at: float | None = None
        self._backlog = position is None
        """What is read now may be from before the first look: until the end was reached once."""
        self._began_at: float | None = None
        self._recent: deque[tuple[float, NodeEvent]] = deque(maxlen=MAX_RECENT)
        self._again = False

    @property
    def problem(self) -> str | None:
        """Why the log cannot be read now."""
        return self._kmsg.problem

    def collect(self, now: float) -> tuple[tuple[NodeEvent, ...], int]:
        """What happened since the last call, the oldest first, and how many records or events were lost or left out."""
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
        self._recent.extend((now, event) for event in events if event.severity is not FaultSeverity.INFO)
        position = self._kmsg.position
        if position is not None and position != self._saved:
            self._saved = position
            self._keep(position, now)
        return past + events, lost + fold.dropped

    def retell(self) -> None:
        """The next `collect` begins with the recent past: the controller has restarted and knows none of it."""
        self._again = True

    def close(self, now: float) -> None:
        """Closes the device."""
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
        path = context.settings.kernel_log
        self._is_on = bool(path)
        self.keeper = self._reader = KernelLogReader(
            path, context.kernel_log_position, context.keep_position, tail=context.kernel_records
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


SPEC = CollectorSpec("kernel_log", KernelLogSection, KernelLogCollector)
