"""From the records of one node at one moment to what its agent would have reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.progress_patterns import Pattern
from slurm_watchdog.model.observations import (
    Checkpoint,
    Event,
    EventKind,
    Gpu,
    GpuHolder,
    LogFile,
    MountProbe,
    NodeEvent,
)
from slurm_watchdog.model.report import Report
from slurm_watchdog.parse.kernel_log.file import parse_kernel_line
from slurm_watchdog.trace import records
from slurm_watchdog.trace.gpu_owners import LEAST_BYTES, AssignedGpus, GpuHolders, assign_gpus
from slurm_watchdog.trace.log_events import Logs
from slurm_watchdog.trace.processes import Processes
from slurm_watchdog.trace.records import ParseStats, with_more

MIB = 1024**2
KEPT_OF_REPORT = (
    "age_s", "interval_s", "agent_version", "events_dropped", "hung_probes", "node_events_dropped",
    "gpu_holders", "problems", "usages", "pressures", "links",
)  # fmt: skip
"""What a recorded `report` line says beyond the other lines of its moment."""
WRITING_S = 1800.0  # As long as one in the log (`collective_hang.checkpoint_floor` as shipped), if told once.
AGAIN = 3.0  # Told again and again: so many times its longest pause may pass without a word.
CHECKPOINTS = "checkpoints"  # Directory of those that a trace tells of: it does not say where they lie.
KILLED = ("oom_kill", "segfault")  # What a kernel says of a process that is over with that.
T = TypeVar("T")


@dataclass
class Node:
    """What is known of one node, and how it becomes reports."""

    name: str
    tally: ParseStats
    interval_s: float
    sequence: int = 0
    boot_id: str = ""
    heard_at: float = float("-inf")
    speaks: bool = False
    """It has said what agents say again and again. One of which a trace tells no more than what it logged has
    no agent that could fall silent."""
    own: tuple[Pattern, ...] = ()  # The site's patterns of progress.
    processes: Processes = field(init=False)
    over: dict[str, str] = field(default_factory=dict)  # Jobs that have ended, and their users, at this moment.
    _holders: GpuHolders = field(default_factory=GpuHolders)
    _cards: dict[str, str] = field(default_factory=dict)  # PCI address -> UUID, as far as it was found out.
    _seats: AssignedGpus = field(default_factory=dict)
    _recorded: bool = False  # A recording says itself who holds a GPU.
    _gpus: dict[str, tuple[Gpu, float]] = field(default_factory=dict)
    _checkpoints: dict[tuple[str, str], tuple[Checkpoint, float]] = field(default_factory=dict)
    _writing: dict[tuple[str, str], tuple[float, float | None]] = field(default_factory=dict)
    """Checkpoint that is being written -> (said last, longest time between two such lines)."""
    _hung_since: dict[str, float] = field(default_factory=dict)
    _sampled_at: set[float] = field(default_factory=set)  # When processes and GPUs were looked at in this moment.
    _ended: set[int] = field(default_factory=set)
    """Pids that the kernel killed, or that left their GPU, or whose GPU was emptied, not listed since."""

    def __post_init__(self) -> None:
        self.processes = Processes(self.tally)
        self._logs = Logs(self.own)

    def forget(self, job_id: str) -> None:
        """The run of this job is over."""
        self.processes.forget(job_id)
        self._logs.forget(job_id)
        for key in [key for key in self._checkpoints if key[0] == job_id]:
            del self._checkpoints[key]
            self._writing.pop(key, None)

    def reports(
        self,
        lines: Sequence[records.Any_],
        now: float,
        *,
        damaged: bool,
        restarts: dict[str, int],
        mounts: set[str],
    ) -> list[Report]:
        """What the agent reported up to `now`: mostly one report, before it a late one if a process turns out
        to be gone.

        `damaged`: lines were lost around this moment, so no one counts as missing.
        """
        procs: list[records.Proc] = []
        report_lines: list[records.Report] = []
        gpus: list[records.Gpu] = []
        others: list[records.Any_] = []
        kept: dict[type, list[Any]] = {records.Proc: procs, records.Report: report_lines, records.Gpu: gpus}
        for each in lines:
            kept.get(type(each), others).append(each)
        self.heard_at, self.speaks = now, self.speaks or bool(procs or report_lines or gpus)
        listed = self.processes.list(procs, now, restarts, mounts)
        more = next((each.more for each in reversed(report_lines) if each.more), None) or {}
        count = next((each.listed for each in reversed(report_lines) if each.listed is not None), None)
        self.boot_id = str(more.get("boot_id", self.boot_id)) or self.name
        late: list[Report] = []
        if count is not None and count == len(listed) and not damaged:
            self.processes.all_listed(listed)
        elif (procs or report_lines) and count is None and not damaged:
            computing = self._note_ended(gpus, others, {pid for _, pid in listed})
            since = self.processes.miss(listed, now, self._ended, computing)
            if since is not None and since < now:
                late = [self._report(now, age_s=now - since)]
        if count is not None:
            self._recorded = True
            self._gpus.clear()  # a recording has them all, every time
            self._logs.rows.clear()
        self._sampled_at = {each.t for table in (procs, report_lines, gpus) for each in table} if others else set()
        for gpu in gpus:
            self._gpu(gpu)
        return [*late, self._whole(others, now, more)]

    def _note_ended(self, gpus: Sequence[records.Gpu], others: Sequence[records.Any_], listed: set[int]) -> set[int]:
        """Takes over what else says that a process is gone. Returns the pids that a GPU lists now."""
        computing: set[int] = set()
        for gpu in gpus:
            known = self._gpus.get(_gpu_name(gpu) or "")
            if gpu.pids is not None:
                computing.update(gpu.pids)
                if known is not None and known[0].pids:
                    self._ended.update(known[0].pids)
            elif known is not None and _was_emptied(known[0], gpu):
                seat = self._seats.get(known[0].uuid or str(known[0].index))
                self._ended.update(seat[1].pids or () if seat is not None else ())
        self._ended -= computing
        self._ended -= listed
        for each in others:  # one that was listed in the same moment may have been so before
            if isinstance(each, records.Kmsg):
                fact = parse_kernel_line(each.line or "")
                if fact is not None and fact.name in KILLED and fact.pid is not None:
                    self._ended.add(fact.pid)
        return computing

    def _report(self, now: float, **fields: Any) -> Report:
        self.sequence += 1
        processes, gpus = self.processes.present(), self._present(self._gpus, now)
        holders: tuple[GpuHolder, ...] = ()
        if not self._recorded:
            gpus = assign_gpus(gpus, processes, self._seats)
            self._holders.remember(processes, gpus)
            lately = self.processes.listed_since(now - self._fresh_s) if self.over else ()
            looked_at = max((at for _, at in self._gpus.values()), default=now)
            holders = self._holders.orphans(lately, gpus, self.over, now, looked_at)
        given = {
            "boot_id": self.boot_id,
            "agent_id": "trace",
            "interval_s": self.interval_s,
            "processes": processes,
            "gpus": gpus,
            "gpu_holders": holders,
            "checkpoints": self._checkpoints_now(now),
        }
        return Report(node=self.name, sequence=self.sequence, **{**given, **fields})

    def _present(self, table: dict[Any, tuple[T, float]], now: float) -> tuple[T, ...]:
        """What was said not long ago: what a GPU did a minute ago is no evidence."""
        fresh_s = self._fresh_s
        return tuple(each for each, at in table.values() if now - at <= fresh_s)

    def _checkpoints_now(self, now: float) -> tuple[Checkpoint, ...]:
        """As they were said last. What no one says any more is written no more."""
        for key, (at, pause_s) in list(self._writing.items()):
            if now - at > (WRITING_S if pause_s is None else max(self._fresh_s, AGAIN * pause_s)):
                found, said_at = self._checkpoints[key]
                self._checkpoints[key] = replace(found, writing=False), said_at
                del self._writing[key]
        return tuple(found for found, _ in self._checkpoints.values())

    def _note_writing(self, key: tuple[str, str], found: Checkpoint, at: float) -> None:
        before = self._writing.pop(key, None)
        if found.writing:
            pause_s = None if before is None else max(at - before[0], before[1] or 0.0)
            self._writing[key] = at, pause_s

    @property
    def _fresh_s(self) -> float:
        return max(30.0, 1.5 * self.interval_s)

    def _whole(self, lines: Iterable[records.Any_], now: float, more: dict[str, Any]) -> Report:
        events: list[Event] = []
        node_events: list[NodeEvent] = []
        probes: list[MountProbe] = []
        for each in lines:
            if isinstance(each, records.Log):
                events.extend(self._log(each, now))
            elif isinstance(each, records.Kmsg):
                node_events.extend(self._kernel(each, now))
            elif isinstance(each, records.Mount):
                probes.extend(self._probe(each))
            elif isinstance(each, records.Checkpoint):
                events.extend(self._checkpoint(each, now))
        given = {
            "logs": tuple(
                replace(row, growth_age_s=None if row.growth_age_s is None else row.growth_age_s + now - at)
                for row, at in self._logs.rows.values()
            ),
            "events": tuple(events),
            "node_events": tuple(node_events),
            "mounts": tuple(probes),
        }
        report = self._report(now, **given)
        return with_more(report, {name: more[name] for name in KEPT_OF_REPORT if name in more}, self.tally) or report

    def _of_more(self, wanted: type[T], fields: dict[str, Any]) -> T | None:
        """One of our values from a recording; None, and counted, if it is none."""
        try:
            return msgspec.convert(fields, wanted)
        except msgspec.ValidationError:
            self.tally.ignore(f"`more` that is not a {wanted.__name__}")
            return None

    # ------------------------------------------------------------------------------------ one record each

    def _log(self, record: records.Log, now: float) -> Iterable[Event]:
        job_id, source, age_s = str(record.job_id), record.stream or "log", now - record.t
        if record.more is not None and record.line is None:
            row = self._of_more(LogFile, {"job_id": job_id, "path": source, **record.more})
            if row is not None:
                self._logs.rows[job_id, row.path] = (row, record.t)
            return
        if record.more is not None:
            event = self._of_more(Event, {"job_id": job_id, "source": source, "line": record.line, **record.more})
            if event is not None:
                yield replace(event, age_s=event.age_s + age_s)
                return
        yield from self._logs.read(record, now, self._sampled_at)

    def _gpu(self, record: records.Gpu) -> None:
        name = _gpu_name(record)
        if name is None:
            self.tally.ignore("a GPU without number and UUID")
            return
        known = self._gpus.get(name)
        index = record.gpu if record.gpu is not None else known[0].index if known else len(self._gpus)
        gpu = Gpu(
            uuid=record.uuid or ("" if self._recorded else f"{self.name}/gpu{index}"),  # distinct, as UUIDs are
            index=index,
            utilization_ratio=None if record.util is None else min(1.0, record.util / 100),
            sm_clock_hz=None if record.sm_clock_mhz is None else record.sm_clock_mhz * 1e6,
            power_w=record.power_w,
            temperature_c=record.temp_c,
            memory_used_bytes=None if record.mem_used_mib is None else int(record.mem_used_mib * MIB),
            throttle=None if record.throttle is None else tuple(record.throttle),
            pids=None if record.pids is None else tuple(record.pids),
        )
        self._gpus[name] = (with_more(gpu, record.more, self.tally) or gpu, record.t)

    def _kernel(self, record: records.Kmsg, now: float) -> Iterable[NodeEvent]:
        age_s = now - record.t
        if record.more is not None:
            event = self._of_more(NodeEvent, {"line": record.line or "", **record.more})
            if event is not None:
                yield replace(event, age_s=event.age_s + age_s)
                return
        fact = parse_kernel_line(record.line or "")
        if fact is not None:
            gpu_uuid = fact.gpu
            if gpu_uuid is None and fact.pci_bus_id is not None:
                gpu_uuid = self._card_at(fact.pci_bus_id, fact.pid)
            yield picked(NodeEvent, fact, source="kernel_log", age_s=age_s, line=fact.message, gpu_uuid=gpu_uuid)

    def _card_at(self, pci_bus_id: str, pid: int | None) -> str | None:
        """The UUID of the GPU at an address: a plain trace tells it by the processes that the kernel's lines name,
        also when that process is over, and in lines that name none."""
        if any(gpu.pci_bus_id for gpu, _ in self._gpus.values()):
            return None
        known = self._holders.of_process(pid)
        if known is not None:
            self._cards.setdefault(pci_bus_id, known)
        return self._cards.get(pci_bus_id)

    def _probe(self, record: records.Mount) -> Iterable[MountProbe]:
        if record.responding is None:
            return
        if record.responding:
            self._hung_since.pop(record.mount, None)
            seconds = record.probe_s or 0.0
        else:
            waited_s = record.t - self._hung_since.setdefault(record.mount, record.t)
            seconds = waited_s if record.probe_s is None else record.probe_s
        probe = MountProbe(mount=record.mount, responding=record.responding, seconds=seconds, wrote=True)
        yield with_more(probe, record.more, self.tally) or probe

    def _checkpoint(self, record: records.Checkpoint, now: float) -> Iterable[Event]:
        job_id = str(record.job_id)
        if record.more:
            found = self._of_more(Checkpoint, {"job_id": job_id, "directory": CHECKPOINTS, **record.more})
            if found is None:
                return
            self._checkpoints[job_id, found.directory] = (found, record.t)
            self._note_writing((job_id, found.directory), found, record.t)
            return
        if record.complete is None or record.step is None:
            return
        key = (job_id, CHECKPOINTS)
        old = self._checkpoints[key][0] if key in self._checkpoints else None
        step = record.step if record.complete else old.step if old else None
        found = Checkpoint(
            job_id=job_id,
            directory=CHECKPOINTS,
            step=step,
            writing_step=None if record.complete else record.step,
            writing=not record.complete,
        )
        self._checkpoints[key] = found, record.t
        self._note_writing(key, found, record.t)
        if record.complete and (old is None or old.step != step or old.writing):
            yield Event(
                kind=EventKind.CHECKPOINT,
                job_id=job_id,
                age_s=now - record.t,
                source=CHECKPOINTS,
                step=record.step,
                pattern="trace",
            )


def _was_emptied(before: Gpu, now: records.Gpu) -> bool:
    """Whether the memory that a program had on a GPU has been given back."""
    if before.memory_used_bytes is None or now.mem_used_mib is None:
        return False
    return now.mem_used_mib * MIB < LEAST_BYTES <= before.memory_used_bytes


def _gpu_name(record: records.Gpu) -> str | None:
    return record.uuid or (f"index {record.gpu}" if record.gpu is not None else None)
