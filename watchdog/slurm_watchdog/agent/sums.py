"""What a node sums up from look to look, so that its numbers need not travel with each: how busy each process was, and
what the recent past of each GPU tells. Pure: the moments are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from msgspec.structs import replace

from slurm_watchdog.model.node_view import work_ratio
from slurm_watchdog.model.observations import Gpu, Process, Role
from slurm_watchdog.model.report import Report

RATE_S = 20.0  # Counters are compared over this time at least: for processes that work in bursts.
POLLS_CPU, QUIET_CPU = 0.5, 0.2  # Cores: a rank that computes or polls uses more than the one, one that waits less.
ASLEEP_LOOKS, ASLEEP_S = 6, 30.0  # Of a process whose time no one tells: so often asleep, after running, it uses none.
WORKS_CPU, WORKS_BYTES_S = 0.05, 1e5  # Who uses more works: a thread that looks around each second uses a tenth.
LEAST_LOOK_S = 1.5  # Between two such looks: CPU time is counted in hundredths of a second.
MOMENT_S = 15.0  # A call on a file that is over so soon: the process moves data. A longer one may be stuck.

THROTTLE_S, THROTTLED_FROM = 300.0, 0.05  # Time constant of shares of throttle reasons, and the least that is reported.
MAX_REASONS = 16  # NVML has 9 (nvmlClocksEventReasons).
MAX_GPUS = 64  # With their past; one that is exchanged replaces the oldest.
IDLE_RATIO = 0.05  # A GPU below this does nothing: a process that merely holds a context shows 0, a spinning kernel 1.
BUSY_RATIO = 0.5
FAST_S, SLOW_S = 60.0, 7200.0  # Time constants of the averages: now, and usually.
SETTLED_LOOKS = 6  # Busy looks before an average says anything: half a minute at the default interval.


@dataclass(slots=True)
class ProcessSums:
    """How busy one process is, from counters that only rise."""

    at: float
    cpu_s: float
    io_bytes: int | None
    cpu_ratio: float | None = None
    io_bytes_s: float | None = None
    storage_at: float | None = None  # When it was last seen waiting for a disk or a file, for a moment only.
    busy_at: float | None = None  # When it was last seen to use most of a core, or some since; None: never.
    runnable: tuple[float, float] | None = None  # How long its main thread had run, and when that was read.
    ran: int = 0  # Looks that found it running, of a process whose time is not reported.
    asleep: int = 0  # Looks since, that found it asleep.
    asleep_at: float = 0.0  # When the first of these was.
    worked_at: float | None = None  # When it was last seen to have worked since the look before; None: never.
    looked_at: float | None = None  # When that look was; None: there was none.
    looked_cpu_s: float = 0.0
    looked_io_bytes: int | None = None
    start_ticks: int = 0

    def update(self, process: Process, now: float) -> None:
        self._note_work(process, now)
        if process.runnable_s is not None:
            self.runnable = process.runnable_s, now
        if (process.blocked is not None or process.state == "D") and _waits_for_a_moment(process):
            self.storage_at = now
        if process.cpu_s <= 0.0 and process.state in ("S", "I"):
            self.asleep, self.asleep_at = self.asleep + 1, self.asleep_at if self.asleep else now
        elif process.cpu_s <= 0.0:
            self.ran, self.asleep = self.ran + (process.state == "R"), 0
        elapsed_s = now - self.at
        if elapsed_s < RATE_S:
            return
        # No one has trained without using any time: nought is what a recording says that does not tell. A
        # loader's worker may have.
        reported = process.role is Role.WORKER or min(process.cpu_s, self.cpu_s) > 0
        used_s = max(0.0, process.cpu_s - self.cpu_s) if reported else None
        self.cpu_ratio = self._by_state(now) if used_s is None else used_s / elapsed_s
        if self.cpu_ratio is None:
            self.busy_at = None
        elif self.cpu_ratio >= (POLLS_CPU if self.busy_at is None else QUIET_CPU):
            self.busy_at = now
        known = process.io_bytes is not None and self.io_bytes is not None
        self.io_bytes_s = max(0, (process.io_bytes or 0) - (self.io_bytes or 0)) / elapsed_s if known else None
        self.at, self.cpu_s, self.io_bytes = now, process.cpu_s, process.io_bytes

    def _note_work(self, process: Process, now: float) -> None:
        before_at, before_cpu_s, before_bytes = self.looked_at, self.looked_cpu_s, self.looked_io_bytes
        passed_s = LEAST_LOOK_S if before_at is None else now - before_at
        if passed_s < LEAST_LOOK_S:
            return
        self.looked_at, self.looked_cpu_s, self.looked_io_bytes = now, process.cpu_s, process.io_bytes
        if before_at is None:
            self.worked_at = now
            return
        counted = process.io_bytes is not None and before_bytes is not None
        moved_bytes = (process.io_bytes or 0) - (before_bytes or 0) if counted else 0
        if process.cpu_s - before_cpu_s > WORKS_CPU * passed_s or moved_bytes > WORKS_BYTES_S * passed_s:
            self.worked_at = now

    def _by_state(self, now: float) -> float | None:
        """None: no one knows. A process that sleeps at every look anyway says nothing by sleeping."""
        slept = self.asleep >= ASLEEP_LOOKS and now - self.asleep_at >= ASLEEP_S
        return 0.0 if slept and self.ran >= ASLEEP_LOOKS else None

    def on(self, process: Process, now: float) -> Process:
        """The row with all that."""
        ran_s, read_at = self.runnable or (None, now)
        return replace(
            process,
            cpu_ratio=self.cpu_ratio,
            io_bytes_s=self.io_bytes_s,
            storage_age_s=None if self.storage_at is None else now - self.storage_at,
            worked_age_s=None if self.worked_at is None else now - self.worked_at,
            quiet_s=None if self.busy_at is None else now - self.busy_at,
            runnable_s=ran_s,
            runnable_age_s=now - read_at or None,
        )


def _waits_for_a_moment(process: Process) -> bool:
    if process.blocked is not None:
        return process.blocked.mount is not None and process.blocked.seconds < MOMENT_S
    return process.state == "D" and (process.state_age_s or 0.0) < MOMENT_S


@dataclass(slots=True)
class Averages:
    """Of a card's clock under load: over about a minute, and over about two hours."""

    wanted_looks: ClassVar[int] = 60  # Busy looks before what is usual is known: over the card's own past.

    fast: float | None = None
    slow: float | None = None
    slow_s: float = 0.0  # Time in `slow` so far, up to its constant: a young average weighs every look alike.
    looks: int = 0

    def add(self, value: float | None, elapsed_s: float) -> None:
        if value is None:
            return
        slow_s = self.slow_s + elapsed_s
        self.slow_s = slow_s if slow_s < SLOW_S else SLOW_S
        # One look says little: an agent that reads once a minute has to average over several of them.
        fast_s = SETTLED_LOOKS * elapsed_s
        self.fast = fast = _average(self.fast, value, elapsed_s, fast_s if fast_s > FAST_S else FAST_S)
        self._add_slow(value, fast, elapsed_s)
        self.looks += 1

    def _add_slow(self, value: float, _fast: float, elapsed_s: float) -> None:
        self.slow = _average(self.slow, value, elapsed_s, self.slow_s)

    def recent(self, busy_looks: int) -> float | None:
        return self.fast if busy_looks >= SETTLED_LOOKS else None

    @property
    def usual(self) -> float | None:
        return self.slow if self.looks >= self.wanted_looks else None


class PowerAverages(Averages):
    """Of what a program has a GPU do. What is usual rises at once and falls slowly: while the program hangs, its power
    is no news about what it draws at work."""

    __slots__ = ()
    wanted_looks = 24  # Two minutes of the program.

    def _add_slow(self, _value: float, fast: float, elapsed_s: float) -> None:
        if self.looks >= SETTLED_LOOKS:
            slow = _average(self.slow, fast, elapsed_s, SLOW_S)
            self.slow = fast if fast > slow else slow


@dataclass(slots=True)
class GpuSums:
    """What is remembered of one GPU."""

    seen_at: float
    idle_since: float | None = None
    busy_since: float | None = None
    looks: int = 0
    clock_hz: Averages = field(default_factory=Averages)
    power_w: PowerAverages = field(default_factory=PowerAverages)
    work_ratio: PowerAverages | None = None  # None: it has not said anything yet, as cards without GPM never do.
    pids: tuple[int, ...] = ()  # Who computed on it last: its power and activity are usual for that program only.
    throttled: dict[str, float] = field(default_factory=dict)
    """Under the load of those that compute on it now: empty again once it rests, or others do."""
    idle: float = 0.0  # Sum of the shares in which it did nothing,
    idle_looks: int = 0  # in so many looks since the last whole report.
    row: Gpu | None = None  # As it was looked at last.

    def update(self, gpu: Gpu, now: float) -> None:
        """One look. A GPU that says nothing keeps its averages and has no `since`."""
        if gpu.pids and gpu.pids != self.pids:
            if self.pids and frozenset(self.pids).isdisjoint(gpu.pids):
                self.power_w, self.work_ratio = PowerAverages(), None
            if set(self.pids) != set(gpu.pids):
                self.throttled = {}
            self.pids = gpu.pids
        ratio = gpu.utilization_ratio
        if ratio is None:
            self.idle_since = self.busy_since = None
            self.looks = 0
            return
        elapsed_s = max(0.0, now - self.seen_at)
        self.seen_at = now
        self.idle, self.idle_looks = self.idle + min(1.0, max(0.0, 1.0 - ratio)), self.idle_looks + 1
        self.idle_since = _since(self.idle_since, ratio <= IDLE_RATIO, now)
        self.busy_since = _since(self.busy_since, ratio >= BUSY_RATIO, now)
        self.looks = self.looks + 1 if self.busy_since is not None else 0
        if self.idle_since is not None:
            self.throttled = {}
        if self.looks > 1:  # the first busy look may have caught it on its way up
            self.clock_hz.add(gpu.sm_clock_hz, elapsed_s)
            self.power_w.add(gpu.power_w, elapsed_s)
            if (worked := work_ratio(gpu)) is not None:
                self.work_ratio = self.work_ratio or PowerAverages()
                self.work_ratio.add(worked, elapsed_s)
            if gpu.throttle or self.throttled:
                self.throttled = _throttled_now(self.throttled, gpu.throttle, elapsed_s)

    def on(self, gpu: Gpu, now: float) -> Gpu:
        """The row with all that."""
        return replace(
            gpu,
            idle_age_s=None if self.idle_since is None else now - self.idle_since,
            busy_age_s=None if self.busy_since is None else now - self.busy_since,
            recent_sm_clock_hz=self.clock_hz.recent(self.looks),
            usual_sm_clock_hz=self.clock_hz.usual,
            recent_power_w=self.power_w.recent(self.looks),
            usual_power_w=self.power_w.usual,
            usual_work_ratio=None if self.work_ratio is None else self.work_ratio.usual,
            throttled=tuple(sorted((why, share) for why, share in self.throttled.items() if share >= THROTTLED_FROM)),
            idle_ratio=self.idle / self.idle_looks if self.idle_looks else None,
            looks=self.idle_looks,
        )


@dataclass
class NodeSums:
    """Of one node, for as long as its agent and its kernel live."""

    processes: dict[int, ProcessSums] = field(default_factory=dict)  # By pid.
    gpus: dict[str, GpuSums] = field(default_factory=dict)  # At most MAX_GPUS; what was looked at last is the last.

    def add(self, report: Report, now: float) -> Report:
        """The report of the look at `now` (seconds; of any clock that does not jump), with what all looks tell."""
        known, self.processes = self.processes, {}
        processes, gpus = [], []
        for row in report.processes:
            sums = known.get(row.pid)
            if sums is not None and sums.start_ticks != row.start_ticks:
                sums = None
            if sums is None and row.role is Role.HELPER and row.state != "D" and row.blocked is None:
                processes.append(row)  # of these all that counts is whether they move data
                continue
            if sums is None:
                sums = ProcessSums(now, row.cpu_s, row.io_bytes, start_ticks=row.start_ticks)
            self.processes[row.pid] = sums
            sums.update(row, now)
            processes.append(sums.on(row, now))
        for gpu in report.gpus:
            past = self.gpus.pop(gpu.uuid, None) or GpuSums(seen_at=now)
            self.gpus[gpu.uuid] = past
            if past.row is not gpu:  # else no one has looked at it since
                past.row = gpu
                past.update(gpu, now)
            gpus.append(past.on(gpu, now))
        while len(self.gpus) > MAX_GPUS:
            del self.gpus[next(iter(self.gpus))]
        return replace(report, processes=tuple(processes), gpus=tuple(gpus))

    def begin(self) -> None:
        """A whole report was made: sums since the last one begin again."""
        for past in self.gpus.values():
            past.idle, past.idle_looks = 0.0, 0


def _throttled_now(throttled: dict[str, float], reasons: tuple[str, ...] | None, elapsed_s: float) -> dict[str, float]:
    """A card that comes and goes with its heat is seen between two of its moments half of the time."""
    if reasons is None:
        return throttled
    shares = {
        reason: _average(throttled.get(reason, 0.0), float(reason in reasons), elapsed_s, THROTTLE_S)
        for reason in {*throttled, *reasons[:MAX_REASONS]}
    }
    return {reason: share for reason, share in shares.items() if share >= THROTTLED_FROM / 10}


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return (now if before is None else before) if holds else None


def _average(old: float | None, value: float, elapsed_s: float, constant_s: float) -> float:
    """Exponential moving average with a time constant."""
    if old is None:
        return value
    weight = elapsed_s / constant_s if constant_s > 0 else 0.0
    return old + (weight if weight < 1.0 else 1.0) * (value - old)
