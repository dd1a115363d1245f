"""What each node itself is like: its newest whole report, and what is remembered of its GPUs, links and limits, of what
its kernel logged, and of who held GPUs.

A node's view is made when a whole report comes, and handed out as it is until the next one: ten thousand nodes
cost a tick nothing. A small report moves one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.analysis.slurm_nodes import is_quiet
from slurm_watchdog.base.capped import put_newest
from slurm_watchdog.base.memo import Series
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.ticking import SHOWN_S
from slurm_watchdog.knowledge.host_parts import PARTS
from slurm_watchdog.model.node_view import (
    GpuView,
    LinkView,
    NodeView,
    Rise,
    SeenEvent,
    SeenMount,
    SeenUsage,
    SlurmNodeView,
)
from slurm_watchdog.model.observations import Checkpoint, FaultSeverity, Gpu, GpuHolder, Link, NodeEvent
from slurm_watchdog.model.report import Report, State
from slurm_watchdog.model.slurm import SlurmView
from slurm_watchdog.model.slurm_states import RUNNING, is_away, is_lost

NOTHING: Mapping[str, Any] = MappingProxyType({})  # For the empty dictionaries of 80,000 GPUs, 80 bytes each.
KEPT_EVENTS = 100
KEPT_EVENT_S = 3600.0
FOLD_S = 60.0  # Corrected errors of one part within it are kept as one event with a count.
KEPT_HOLDER_S = 86_400.0
MAX_HOLDERS = 256
MAX_MOUNTS = 64  # Of one node; an agent probes 16.
KEPT_MOUNT_S = 600.0  # A mount that was not probed for so long is used by no one any more.
KEPT_USAGE_S = 600.0  # As long as `memory_kill` reports a kill by default: its group is gone by then, most often.
MAX_USAGES = 1024
COUNTERS = ("ecc_uncorrected", "ecc_corrected", "pcie_replays", "nvlink_errors")
"""Of a GPU. All but the first rise when something is put right."""
RISE_BREAK_S = 900.0
FLAP_S = 3600.0  # A link that went down is held to have flapped for so long.
MAX_TIMES = 32
LINK_BREAK_S = 150.0  # Between two and three looks of an agent.
UNCOUNTED_S = 300.0  # One of which no one counts bytes carries some after so long: its node has started.
USUAL_S, USUAL_LOOKS = 3600.0, 10  # Time constant of what usually goes through, and looks before it is known.
SAME_XID_S = 60.0  # NVML and the kernel's log tell the same Xid of the same GPU within this time: it is one fault.
COUNTED_LOST = 3  # Listings in a row that lack a node: detect.node_rules asks for no more.


class _Counters(msgspec.Struct, gc=False):
    """Of one GPU."""

    said: tuple[int | None, ...] = (None,) * len(COUNTERS)  # As they were said last.
    known: tuple[int | None, ...] = (None,) * len(COUNTERS)  # As they were last said with a number.
    ecc_rose_at: float | None = None
    rising: Mapping[str, Rise] = msgspec.field(default_factory=lambda: NOTHING)


@dataclass(slots=True)
class KnownLink:
    link: Link
    seen_at: float
    up_from: float | None = None
    down_since: float | None = None
    went_down: list[float] = field(default_factory=list)
    best: int | None = None
    usual: float | None = None
    looks: int = 0
    rising: Rise | None = None
    carried: bool = False


@dataclass(slots=True)
class _Node:
    report: Report  # The newest whole one that was taken over.
    gpus: dict[str, _Counters] = field(default_factory=dict)  # Of the GPUs that it named last.
    links: dict[str, KnownLink] = field(default_factory=dict)
    events: list[SeenEvent] = field(default_factory=list)  # The newest KEPT_EVENTS, oldest first.
    records: list[tuple[str, int]] = field(default_factory=list)  # (source, sequence) of records that have come.
    held: dict[tuple[int, int], tuple[float, GpuHolder]] = field(default_factory=dict)
    """(pid, start ticks) of every process that held a GPU outside of jobs -> when it was last seen to, and as what."""
    mounts: dict[str, SeenMount] = field(default_factory=dict)
    usages: dict[tuple[object, ...], SeenUsage] = field(default_factory=dict)
    whole_at: float = 0.0  # When its newest whole report was made,
    held_s: float = 0.0  # and for how long small ones have said since that all is as it was.


class Nodes:
    """Every node that has sent a whole report. One loop owns it."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._views: dict[str, NodeView] = {}
        self._names: list[str] = []  # Of all views, sorted; empty: to be sorted again.
        self._all: Series[NodeView] | None = None  # All views, in that order; None: to be put together again.
        self._made_at, self._is_old = 0.0, False  # When that was, and whether one of a quiet node has come since.

    def is_as(self, name: str, agent_id: str, report: Report | State) -> bool:
        """Whether a small report names the whole one of its node that was taken over last, with the same classes: it is
        as that one said. Else nothing is known of what it does."""
        node = self._nodes.get(name)
        return node is not None and node.report.sequence == report.same_as and _is_alike(node, agent_id, report)

    def is_alike(self, report: Report) -> bool:
        """Whether its classes are those of the whole report before, of the same agent; no class is none."""
        node = self._nodes.get(report.node)
        return node is not None and _is_alike(node, report.agent_id, report)

    def hold(self, name: str, made_at: float) -> None:
        """All was at `made_at` as the newest whole report of this node says."""
        node = self._nodes[name]
        node.held_s = max(node.held_s, made_at - node.whole_at)

    def held(self, name: str) -> tuple[float, float]:
        """When the newest whole report of this node was made, and for how long it has held since."""
        node = self._nodes.get(name)
        return (0.0, 0.0) if node is None else (node.whole_at, node.held_s)

    def note_events(self, name: str, events: tuple[NodeEvent, ...], made_at: float) -> None:
        """What happened on a node, where its report was a small one; of one whose kernel is not known nothing."""
        node, view = self._nodes.get(name), self._views.get(name)
        if node is None or view is None:
            return
        _note_events(node, events, made_at)
        self._show(replace(view, events=tuple(node.events), quiet=False))

    def _show(self, view: NodeView) -> bool:
        before = self._views.get(view.name)
        self._views[view.name] = view = replace(view, quiet=True) if is_quiet(view) else view
        self._is_old = True
        if before is None or not (before.quiet and view.quiet):
            self._all = None
        if before is None:
            self._names = []
        if view.quiet:
            return before is None or not before.quiet
        return not view.events or not is_quiet(replace(view, events=()))

    def apply(self, report: Report, made_at: float) -> bool:
        """Takes over one whole report that was made at `made_at` on the caller's clock. Returns whether anything in
        it, or in the one before, is not well apart from what was logged."""
        node = self._nodes.get(report.node)
        if node is None or node.report.boot_id != report.boot_id:
            held = node.held if node is not None else {}  # no process survives a restart of its node
            node = self._nodes[report.node] = _Node(report, held=held)
        node.report = replace(report, node_events=()) if report.node_events else report
        node.whole_at, node.held_s = made_at, 0.0
        _note_events(node, report.node_events, made_at)
        for probe in report.mounts:
            put_newest(node.mounts, probe.mount, SeenMount(at=made_at, probe=probe), MAX_MOUNTS)
        for mount in [m for m, seen in node.mounts.items() if made_at - seen.at > KEPT_MOUNT_S]:
            del node.mounts[mount]
        holding = {(each.pid, each.start_ticks): (made_at, each) for each in report.gpu_holders}
        if holding or node.held:
            node.held.update(sorted(holding.items(), key=lambda each: each[0]))
            recent = [key for key, (at, _) in node.held.items() if made_at - at <= KEPT_HOLDER_S]
            node.held = {key: node.held[key] for key in recent[-MAX_HOLDERS:]}
        if report.gpus:  # else nothing was seen: what is known stays
            node.gpus = {gpu.uuid: node.gpus.get(gpu.uuid) or _Counters() for gpu in report.gpus}
        return self._show(
            NodeView(
                name=report.node,
                reported_at=made_at,
                boot_id=report.boot_id,
                gpus=tuple([_gpu_view(node.gpus[gpu.uuid], report.node, gpu, made_at) for gpu in report.gpus]),
                events=tuple(node.events),
                holders=report.gpu_holders,
                released=tuple(holder for key, (_, holder) in node.held.items() if key not in holding)
                if node.held
                else (),
                mounts=tuple(node.mounts[mount] for mount in sorted(node.mounts)),
                hung_probes=report.hung_probes,
                problems=report.problems,
                usages=_usages(node, report, made_at),
                pressures=report.pressures,
                links=look_at(node.links, report.links, made_at),
                rates=tuple(
                    (each.name, each.kind, each.rate_bits_s) for each in report.links if each.up and each.rate_bits_s
                ),
            )
        )

    def forget(self, name: str) -> None:
        """This node is no part of the cluster any more."""
        self._nodes.pop(name, None)
        self._views.pop(name, None)
        self._names, self._all = [], None

    def views(self, now: float = math.inf) -> tuple[NodeView, ...]:
        """All nodes, by name; numbers of those that have nothing to tell may be SHOWN_S old."""
        if self._all is None or (self._is_old and not 0.0 <= now - self._made_at < SHOWN_S):
            self._names = self._names or sorted(self._views)
            self._all = Series(map(self._views.__getitem__, self._names))
            self._made_at, self._is_old = now, False
        return self._all

    def view(self, name: str) -> NodeView | None:
        return self._views.get(name)

    def report(self, name: str) -> Report | None:
        """The node's newest whole report."""
        node = self._nodes.get(name)
        return None if node is None else node.report

    def checkpoints_of(self, process_job_id: str, nodes: tuple[str, ...]) -> tuple[Checkpoint, ...]:
        """What the nodes of a job last saw of its checkpoint directories."""
        reports = (node.report for name in nodes if (node := self._nodes.get(name)) is not None)
        return tuple(each for report in reports for each in report.checkpoints if each.job_id == process_job_id)


def _is_alike(node: _Node, agent_id: str, report: Report | State) -> bool:
    return bool(report.state) and node.report.state == report.state and node.report.agent_id == agent_id


def _note_events(node: _Node, events: tuple[NodeEvent, ...], made_at: float) -> None:
    for event in events:
        _note_event(node, event, made_at - max(0.0, event.age_s))
    while node.events and made_at - node.events[0].at > KEPT_EVENT_S:
        del node.events[0]


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


def _gpu_view(past: _Counters, name: str, gpu: Gpu, now: float) -> GpuView:
    """The GPU with its past, as its node has summed it up, and with counters of errors that rise."""
    said = (gpu.ecc_uncorrected, gpu.ecc_corrected, gpu.pcie_replays, gpu.nvlink_errors)
    if said != past.said or past.rising:
        past.said = said
        _note_counters(past, now)
    return GpuView(
        node=name,
        gpu=gpu,
        idle_since=None if gpu.idle_age_s is None else now - gpu.idle_age_s,
        busy_since=None if gpu.busy_age_s is None else now - gpu.busy_age_s,
        ecc_uncorrected_rose_at=past.ecc_rose_at,
        rising=tuple(past.rising.values()) if past.rising else (),
    )


def _note_counters(past: _Counters, now: float) -> None:
    """Since when those of corrected errors rise without a long break. One that falls was reset with the driver."""
    rising = dict(past.rising)
    for counter, before, value in zip(COUNTERS, past.known, past.said, strict=True):
        rise = rising.get(counter)
        if value is not None and before is not None and value > before:
            if counter == COUNTERS[0]:
                past.ecc_rose_at = now
            else:
                rising[counter] = risen(rise, counter, now, RISE_BREAK_S)
        elif value is not None and rise is not None and now - rise.last_at > RISE_BREAK_S:
            del rising[counter]
    past.known = tuple(old if new is None else new for old, new in zip(past.known, past.said, strict=True))
    past.rising = rising or NOTHING


def look_at(known: dict[str, KnownLink], links: tuple[Link, ...], now: float) -> tuple[LinkView, ...]:
    """What the links of a node are at `now`; `known` is since its start. One that is not named any more is forgotten:
    its adapter is gone."""
    if not links:
        return ()  # nothing was seen: what is known stays
    for gone in known.keys() - {link.name for link in links}:
        del known[gone]
    for link in links:
        past = known.setdefault(link.name, KnownLink(link=link, seen_at=now))
        if past.link != link:
            _look(past, link, now)
        past.carried = past.carried or bool(link.moved_bytes_s)
        if link.up and past.up_from is None:
            past.up_from = now
        if link.up and link.moved_bytes_s is None and not past.looks and past.up_from is not None:
            past.carried = past.carried or now - past.up_from >= UNCOUNTED_S
        if link.up is not None:
            past.down_since = (past.down_since or now) if past.up_from is not None and not link.up else None
        if link.rate_bits_s is not None and link.up is not False:
            past.best = max(past.best or 0, link.rate_bits_s)
        past.link = link
    return tuple(_view(known[link.name], now) for link in links)


def _look(past: KnownLink, link: Link, now: float) -> None:
    before = past.link
    if before.kind != link.kind or (before.downs is not None and link.downs is not None and link.downs < before.downs):
        past.best = None  # its driver was loaded again: it may be another adapter
    fell = before.downs is not None and link.downs is not None and link.downs > before.downs
    if past.carried and (fell or (before.up is True and link.up is False)):  # before, it is its node that starts
        past.went_down = [*past.went_down, now][-MAX_TIMES:]
    if before.errors is not None and link.errors is not None and link.errors > before.errors:
        past.rising = risen(past.rising, "errors", now, LINK_BREAK_S)
    moved = link.moved_bytes_s
    if moved is not None:
        weight = min(1.0, max(0.0, now - past.seen_at) / USUAL_S)
        past.usual = (
            moved if past.usual is None else past.usual + max(weight, 1 / (past.looks + 1)) * (moved - past.usual)
        )
        past.looks += 1
        past.seen_at = now


def _view(past: KnownLink, now: float) -> LinkView:
    past.went_down = [at for at in past.went_down if now - at <= FLAP_S]
    rising = past.rising if past.rising is not None and now - past.rising.last_at <= LINK_BREAK_S else None
    usual, went_down = past.usual if past.looks >= USUAL_LOOKS else None, tuple(past.went_down)
    more = {"went_down": went_down, "best_rate_bits_s": past.best, "usual_bytes_s": usual, "rising": rising}
    return picked(LinkView, past, "link", "down_since", "carried", **more)


def risen(rise: Rise | None, counter: str, now: float, break_s: float) -> Rise:
    """A counter has risen once more; after a break longer than `break_s` it is a new rise."""
    if rise is None or now - rise.last_at > break_s:
        return Rise(counter=counter, first_at=now, last_at=now, times=1)
    return replace(rise, last_at=now, times=rise.times + 1)


def node_views(view: SlurmView, known: Iterable[SlurmNodeView], now: float) -> tuple[SlurmNodeView, ...]:
    """The nodes of a listing, with what two listings tell: since when a node is back, and in how many it was
    lost. `known`: by the listing before."""
    before = {node.name: node for node in known}
    in_use = {name for job in view.jobs if job.state in RUNNING for name in job.nodes}
    found = []
    for node in view.nodes:
        old, runs_job = before.get(node.name), node.name in in_use
        back_at = old.back_at if old is not None else None
        if old is not None and is_away(old.state, old.runs_job) and not is_away(node.state, runs_job):
            back_at = now
        lost = min(COUNTED_LOST, 1 + (old.lost_listings or 0 if old is not None else 0)) if is_lost(node.state) else 0
        found.append(
            picked(
                SlurmNodeView, node, "name", "state", "reason", runs_job=runs_job, back_at=back_at, lost_listings=lost
            )
        )
    return tuple(found)
