"""What each node itself is like: its GPUs with their recent past, what its kernel logged, who holds GPUs, how
its mounts answer.

A node's view is made when its report comes, and handed out as it is until the next one: ten thousand nodes
cost a tick nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from msgspec.structs import replace

from slurm_watchdog.analysis.slurm_nodes import is_quiet, is_tight
from slurm_watchdog.base.capped import LeftOut, put_newest
from slurm_watchdog.controller.state.links import Links
from slurm_watchdog.knowledge.host_parts import PARTS
from slurm_watchdog.model.node_view import GpuView, NodeView, Rise, SeenEvent, SeenMount, SeenUsage, work_ratio
from slurm_watchdog.model.observations import Checkpoint, FaultSeverity, Gpu, GpuHolder, NodeEvent
from slurm_watchdog.model.report import Report

NOTHING: Mapping[str, Any] = MappingProxyType({})  # For the empty dictionaries of 80,000 GPUs, 80 bytes each.
KEPT_EVENTS = 100
KEPT_EVENT_S = 3600.0
FOLD_S = 60.0  # Corrected errors of one part within it are kept as one event with a count.
KEPT_HOLDER_S = 86_400.0
MAX_HOLDERS = 256
MAX_GPUS = 64  # Of one node with their past; an agent knows 64. One that is exchanged replaces the oldest.
MAX_MOUNTS = 64  # Of one node; an agent probes 16.
KEPT_MOUNT_S = 600.0  # A mount that was not probed for so long is used by no one any more.
KEPT_USAGE_S = 600.0  # As long as `memory_kill` reports a kill by default: its group is gone by then, most often.
MAX_USAGES = 1024
THROTTLE_S, THROTTLED_FROM = 300.0, 0.05  # Time constant of shares of throttle reasons, and the least that is reported.
MAX_REASONS = 16  # NVML has 9 (nvmlClocksEventReasons); an agent's word is bounded like any other.
IDLE_RATIO = 0.05  # A GPU below this does nothing: a process that merely holds a context shows 0, a spinning kernel 1.
BUSY_RATIO = 0.5
FAST_S, SLOW_S = 60.0, 7200.0  # Time constants of the averages: now, and usually.
SETTLED_LOOKS = 6  # Busy looks before an average says anything: half a minute at the default interval.
CORRECTIONS = ("ecc_corrected", "pcie_replays", "nvlink_errors")  # They rise when something is put right.
RISE_BREAK_S = 900.0
SAME_XID_S = 60.0  # NVML and the kernel's log tell the same Xid of the same GPU within this time: it is one fault.


@dataclass(slots=True)
class _Averages:
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


class _PowerAverages(_Averages):
    """Of what a program has a GPU do. What is usual rises at once and falls slowly: while the program hangs, its power
    is no news about what it draws at work."""

    __slots__ = ()
    wanted_looks = 24  # Two minutes of the program.

    def _add_slow(self, _value: float, fast: float, elapsed_s: float) -> None:
        if self.looks >= SETTLED_LOOKS:
            slow = _average(self.slow, fast, elapsed_s, SLOW_S)
            self.slow = fast if fast > slow else slow


@dataclass(slots=True)
class _Past:
    """What is remembered of one GPU."""

    seen_at: float
    idle_since: float | None = None
    busy_since: float | None = None
    looks: int = 0
    clock_hz: _Averages = field(default_factory=_Averages)
    power_w: _Averages = field(default_factory=_PowerAverages)
    work_ratio: _Averages | None = None  # None: it has not said anything yet, as cards without GPM never do.
    pids: tuple[int, ...] = ()  # Who computed on it last: its power and activity are usual for that program only.
    throttled: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    """Under the load of those that compute on it now: empty again once it rests, or others do."""
    ecc_uncorrected: int | None = None
    ecc_rose_at: float | None = None
    corrections: tuple[int | None, ...] = (None, None, None)  # CORRECTIONS as they were said last.
    counters: tuple[int | None, ...] = (None, None, None)  # The same, as they were last said with a number.
    rising: Mapping[str, Rise] = field(default_factory=lambda: NOTHING)
    view: GpuView | None = None  # As it was handed out last.


@dataclass(slots=True)
class _Node:
    gpus: dict[str, _Past] = field(default_factory=dict)  # At most MAX_GPUS; what reported last is the last.
    boot_id: str = ""
    events: list[SeenEvent] = field(default_factory=list)  # The newest KEPT_EVENTS, oldest first.
    records: list[tuple[str, int]] = field(default_factory=list)  # (source, sequence) of records that have come.
    held: dict[tuple[int, int], tuple[float, GpuHolder]] = field(default_factory=dict)
    """(pid, start ticks) of every process that held a GPU outside of jobs -> when it was last seen to, and as what."""
    mounts: dict[str, SeenMount] = field(default_factory=dict)
    checkpoints: dict[tuple[str, str], Checkpoint] = field(default_factory=dict)
    usages: dict[tuple[object, ...], SeenUsage] = field(default_factory=dict)
    links: Links = field(default_factory=Links)


class Nodes:
    """Every node that has reported. One loop owns it."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out
        self._nodes: dict[str, _Node] = {}
        self._views: dict[str, NodeView] = {}
        self._names: list[str] = []  # Of all views, sorted.

    def apply(self, report: Report, made_at: float) -> bool:
        """Takes over one report that was made at `made_at` on the caller's clock. Returns whether it says more than
        numbers of what is well."""
        node = self._nodes.get(report.node)
        if node is None or node.boot_id != report.boot_id:
            held = node.held if node is not None else {}  # no process survives a restart of its node
            node = self._nodes[report.node] = _Node(boot_id=report.boot_id, held=held)
        for event in report.node_events:
            _note_event(node, event, made_at - max(0.0, event.age_s))
        while node.events and made_at - node.events[0].at > KEPT_EVENT_S:
            del node.events[0]
        for probe in report.mounts:
            if put_newest(node.mounts, probe.mount, SeenMount(at=made_at, probe=probe), MAX_MOUNTS):
                self._left_out.note("mounts", report.node)
        for mount in [m for m, seen in node.mounts.items() if made_at - seen.at > KEPT_MOUNT_S]:
            del node.mounts[mount]
        node.checkpoints = {(each.job_id, each.directory): each for each in report.checkpoints}
        holding = {(each.pid, each.start_ticks): (made_at, each) for each in report.gpu_holders}
        if holding or node.held:
            node.held.update(sorted(holding.items(), key=lambda each: each[0]))
            recent = [key for key, (at, _) in node.held.items() if made_at - at <= KEPT_HOLDER_S]
            recent = recent[-MAX_HOLDERS:]
            node.held = {key: node.held[key] for key in recent}
        if report.node not in self._views:
            insort(self._names, report.node)
        view = NodeView(
            name=report.node,
            reported_at=made_at,
            boot_id=report.boot_id,
            gpus=tuple(_gpu_view(node, report.node, gpu, made_at) for gpu in report.gpus),
            events=tuple(node.events),
            holders=report.gpu_holders,
            released=tuple(holder for key, (_, holder) in node.held.items() if key not in holding),
            mounts=tuple(node.mounts[mount] for mount in sorted(node.mounts)),
            hung_probes=report.hung_probes,
            problems=report.problems,
            usages=_usages(node, report, made_at),
            pressures=report.pressures,
            links=node.links.apply(report.links, made_at),
            rates=tuple(
                (each.name, each.kind, each.rate_bits_s) for each in report.links if each.up and each.rate_bits_s
            ),
        )
        while len(node.gpus) > MAX_GPUS:
            del node.gpus[next(iter(node.gpus))]
            self._left_out.note("gpus", report.node)
        before = self._views.get(report.node)
        self._views[report.node] = view = replace(view, quiet=True) if is_quiet(view) else view
        return before is None or is_tight(before) or is_tight(view) or not _differ_in_numbers(before, view)

    def forget(self, name: str) -> None:
        """This node is no part of the cluster any more."""
        self._nodes.pop(name, None)
        if self._views.pop(name, None) is not None:
            self._names.remove(name)

    def views(self) -> tuple[NodeView, ...]:
        """All nodes, by name."""
        return tuple(map(self._views.__getitem__, self._names))

    def view(self, name: str) -> NodeView | None:
        return self._views.get(name)

    def checkpoints_of(self, process_job_id: str, nodes: tuple[str, ...]) -> tuple[Checkpoint, ...]:
        """What the nodes of a job last saw of its checkpoint directories."""
        return tuple(
            checkpoint
            for name in nodes
            for (job_id, _), checkpoint in (self._nodes[name].checkpoints.items() if name in self._nodes else ())
            if job_id == process_job_id
        )


def _differ_in_numbers(before: NodeView, after: NodeView) -> bool:
    """Whether the same GPUs work or rest as before."""
    same = len(before.gpus) == len(after.gpus) and bool(before.usages) == bool(after.usages)
    return same and all(
        one.idle_since == other.idle_since
        and one.busy_since == other.busy_since
        and one.gpu.uuid == other.gpu.uuid
        and one.gpu.name == other.gpu.name
        and (one.gpu.utilization_ratio is None) == (other.gpu.utilization_ratio is None)
        and (one.recent_sm_clock_hz is None) == (other.recent_sm_clock_hz is None)
        and (one.usual_sm_clock_hz is None) == (other.usual_sm_clock_hz is None)
        for one, other in zip(before.gpus, after.gpus, strict=True)
    )


def _note_event(node: _Node, event: NodeEvent, at: float) -> None:
    """One event more, unless it was reported before, older than the agent, or the same fault by another source."""
    if event.backlog:
        return
    if event.sequence is not None:
        key = (event.source, event.sequence)
        if key in node.records:
            return
        node.records.append(key)
        del node.records[:-KEPT_EVENTS]
    if event.xid is not None:
        for seen in node.events:
            other = seen.event
            same_gpu = (event.gpu_uuid and event.gpu_uuid == other.gpu_uuid) or (
                event.pci_bus_id and event.pci_bus_id == other.pci_bus_id
            )
            if other.xid == event.xid and same_gpu and other.source != event.source and abs(seen.at - at) < SAME_XID_S:
                return
    if not _folded(node, event, at):
        node.events.append(SeenEvent(at=at, event=event))
    if len(node.events) > KEPT_EVENTS:  # what proves that hardware is broken is forgotten last
        least = next((place for place, seen in enumerate(node.events) if not seen.event.may_exclude_node), 0)
        del node.events[least]


def _folded(node: _Node, event: NodeEvent, at: float) -> bool:
    """Whether a warning about a part of the machine is one more of the same minute: thousands of corrected errors may
    not push out what else is known."""
    if event.severity is not FaultSeverity.WARNING or event.part not in PARTS or event.part == "none":
        return False
    for place in range(len(node.events) - 1, -1, -1):
        seen = node.events[place]
        if at - seen.at >= FOLD_S:
            break
        other = seen.event
        if (other.name, other.device, other.pci_bus_id) == (event.name, event.device, event.pci_bus_id):
            repeats = other.repeats + 1 + event.repeats
            node.events[place] = replace(seen, event=replace(other, repeats=repeats))
            return True
    return False


def _usages(node: _Node, report: Report, made_at: float) -> tuple[SeenUsage, ...]:
    """As they are now, and those that were there within KEPT_USAGE_S."""
    if not report.usages and not node.usages:
        return ()
    for usage in report.usages:
        key = (usage.resource, usage.job_id, usage.step_id, usage.pid)
        old = node.usages.pop(key, None)
        before = None if old is None else old.usage.refused
        rose = before is not None and usage.refused is not None and usage.refused > before  # not known is not 0
        at = made_at if rose else None if old is None else old.refused_at
        node.usages[key] = SeenUsage(at=made_at, usage=usage, refused_at=at)
    node.usages = {key: seen for key, seen in node.usages.items() if made_at - seen.at <= KEPT_USAGE_S}
    for oldest in list(node.usages)[:-MAX_USAGES]:
        del node.usages[oldest]
    return tuple(node.usages.values())


def _gpu_view(node: _Node, name: str, gpu: Gpu, now: float) -> GpuView:
    """The GPU with its past, after this look. A GPU that says nothing keeps its averages and has no `since`."""
    node.gpus[gpu.uuid] = past = node.gpus.pop(gpu.uuid, None) or _Past(seen_at=now)
    if past.view is not None and past.view.gpu is gpu and not past.rising:
        return past.view  # no one has looked at it since: said again, for something else was
    if gpu.pids and gpu.pids != past.pids:
        if past.pids and frozenset(past.pids).isdisjoint(gpu.pids):
            past.power_w, past.work_ratio = _PowerAverages(), None
        if set(past.pids) != set(gpu.pids):
            past.throttled = NOTHING
        past.pids = gpu.pids
    ratio = gpu.utilization_ratio
    if ratio is not None:
        elapsed_s = max(0.0, now - past.seen_at)
        past.seen_at = now
        past.idle_since = _since(past.idle_since, ratio <= IDLE_RATIO, now)
        past.busy_since = _since(past.busy_since, ratio >= BUSY_RATIO, now)
        past.looks = past.looks + 1 if past.busy_since is not None else 0
        if past.idle_since is not None:
            past.throttled = NOTHING
        if past.looks > 1:  # the first busy look may have caught it on its way up
            past.clock_hz.add(gpu.sm_clock_hz, elapsed_s)
            past.power_w.add(gpu.power_w, elapsed_s)
            if (worked := work_ratio(gpu)) is not None:
                past.work_ratio = past.work_ratio or _PowerAverages()
                past.work_ratio.add(worked, elapsed_s)
            if gpu.throttle or past.throttled:
                past.throttled = _throttled_now(past.throttled, gpu.throttle, elapsed_s)
    else:
        past.idle_since = past.busy_since = None
        past.looks = 0
    if gpu.ecc_uncorrected is not None:
        if past.ecc_uncorrected is not None and gpu.ecc_uncorrected > past.ecc_uncorrected:
            past.ecc_rose_at = now
        past.ecc_uncorrected = gpu.ecc_uncorrected
    corrections: tuple[int | None, ...] = (gpu.ecc_corrected, gpu.pcie_replays, gpu.nvlink_errors)
    if corrections != past.corrections or past.rising:
        past.corrections = corrections
        _note_corrections(past, now)
    past.view = GpuView(
        node=name,
        gpu=gpu,
        seen_at=past.seen_at,
        idle_since=past.idle_since,
        busy_since=past.busy_since,
        recent_sm_clock_hz=past.clock_hz.recent(past.looks),
        usual_sm_clock_hz=past.clock_hz.usual,
        recent_power_w=past.power_w.recent(past.looks),
        usual_power_w=past.power_w.usual,
        usual_work_ratio=None if past.work_ratio is None else past.work_ratio.usual,
        throttled=tuple(sorted((why, share) for why, share in past.throttled.items() if share >= THROTTLED_FROM)),
        ecc_uncorrected_rose_at=past.ecc_rose_at,
        rising=tuple(past.rising.values()),
    )
    return past.view


def _throttled_now(
    throttled: Mapping[str, float], reasons: tuple[str, ...] | None, elapsed_s: float
) -> Mapping[str, float]:
    """A card that comes and goes with its heat is seen between two of its moments half of the time."""
    if reasons is None:
        return throttled
    shares = {
        reason: _average(throttled.get(reason, 0.0), float(reason in reasons), elapsed_s, THROTTLE_S)
        for reason in {*throttled, *reasons[:MAX_REASONS]}
    }
    return {reason: share for reason, share in shares.items() if share >= THROTTLED_FROM / 10} or NOTHING


def _note_corrections(past: _Past, now: float) -> None:
    """Counters of corrected errors: since when they rise without a long break. One that falls was reset with
    the driver."""
    rising = dict(past.rising)
    for counter, before, value in zip(CORRECTIONS, past.counters, past.corrections, strict=True):
        rise = rising.get(counter)
        if value is None:
            continue
        if before is not None and value > before:
            if rise is None or now - rise.last_at > RISE_BREAK_S:
                rise = Rise(counter=counter, first_at=now, last_at=now, times=0)
            rising[counter] = replace(rise, last_at=now, times=rise.times + 1)
        elif rise is not None and now - rise.last_at > RISE_BREAK_S:
            del rising[counter]
    pairs = zip(past.counters, past.corrections, strict=True)
    past.counters = tuple(before if value is None else value for before, value in pairs)
    past.rising = rising or NOTHING


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return (now if before is None else before) if holds else None


def _average(old: float | None, value: float, elapsed_s: float, constant_s: float) -> float:
    """Exponential moving average with a time constant."""
    if old is None:
        return value
    weight = elapsed_s / constant_s if constant_s > 0 else 0.0
    return old + (weight if weight < 1.0 else 1.0) * (value - old)
