"""Which events are held against their node, how much each weighs, and why the others are not. Pure.

An event may turn out to be nobody's: its incident is explained by another one, many nodes had the same in one
moment, or it moves from node to node with one job. Each rule here takes events away, and says why.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from slurm_watchdog.analysis.slurm_nodes import CROWD_NODES, CROWD_S
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind

DAY_S: Final = 86400.0
WINDOW_S: Final = 14 * DAY_S
"""The third event of a node within this time is said. Meta's search for lemon nodes looks at twice that time
(28 days: A. Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025,
arXiv:2410.21680)."""
HALF_LIFE_S: Final = 28 * DAY_S
"""After this time an event weighs half, at the end of those 28 days a quarter, after half a year nothing."""
FORGOTTEN_S: Final = 6 * HALF_LIFE_S
"""An event weighs a sixty-fourth then: it is history."""
TRAVELS = 3
"""A job that had the same so often within WINDOW_S, and half of it or more elsewhere, takes it along."""
SAME_S: Final = 1800.0
"""What one fault sets off on its node (a dead rank, Slurm's ping, its drain) comes within SlurmdTimeout (300 s by
default) and a restart of the node."""

CONFIRMED: Final = frozenset({NodeEventKind.SLOWED_JOB, NodeEventKind.SLOWED_ONCE, NodeEventKind.TEST_FAILED})
"""A test that fails soon after the search for a slow node is no part of the same: it was asked for to confirm it."""
STRENGTHS: Final[Mapping[str, float]] = MappingProxyType(
    {
        NodeEventKind.TEST_FAILED: 1.0,
        NodeEventKind.RESTART_HELPED: 1.0,
        NodeEventKind.SLOWED_JOB: 2.2,
        NodeEventKind.SLOWED_ONCE: 0.9,
        NodeEventKind.DRAINED: 0.9,
        NodeEventKind.LINK_DOWN: 0.9,
    }
)
"""How strongly a kind that no detector declares speaks against a node; what is not in here says nothing. A job that was
slow in each run with the node and fast in each without it is proof by several runs, and nearly makes a suspect by
itself: but a job's log is its owner's word, and so it takes one thing more."""
OWN_KINDS: Final = frozenset(NodeEventKind)


def strength_of(kind: str) -> float:
    """From 0, nothing, to 1: the node itself is proven broken. Of an incident its detector declares it."""
    return STRENGTHS.get(kind, 0.0) if kind in OWN_KINDS else spec_of(kind).blames_node


def weight(kind: str, age_s: float) -> float:
    """What an event of this kind still weighs at this age."""
    return float(strength_of(kind) * 0.5 ** (max(0.0, age_s) / HALF_LIFE_S))


@dataclass(frozen=True, slots=True)
class Counted:
    """An event, the node that it counts for today, and its strength; with `why_not` it does not count."""

    event: NodeEvent
    node: str
    strength: float
    why_not: str = ""

    def weight(self, now: float) -> float:
        """What it weighs at this date."""
        age_s = max(0.0, now - self.event.at)
        return float(self.strength * 0.5 ** (age_s / HALF_LIFE_S)) if not self.why_not else 0.0


def counted(events: Iterable[NodeEvent], gpu_nodes: Mapping[str, str], renamed: Mapping[str, str]) -> list[Counted]:
    """Every event with what it counts for, oldest first.

    `gpu_nodes`: GPU's UUID -> the node that it is in now, as far as is known: its events follow it. `renamed`: a
    node's name before -> its name now.
    """
    found = []
    for event in sorted(events, key=lambda each: (each.at, each.key)):
        node = renamed.get(event.node, event.node)
        why_not = event.withdrawn_why
        strength = strength_of(event.kind)
        if not why_not and strength <= 0:
            why_not = "it says nothing against the node"
        found.append(Counted(event, gpu_nodes.get(event.place, node), strength, why_not))
    for rule in (_mended, _crowds, _travelling, _one_fault):
        found = rule(found)
    return found


def _mended(events: Sequence[Counted]) -> list[Counted]:
    mended: dict[tuple[str, str], float] = {}
    for each in events:
        if each.event.kind == NodeEventKind.MENDED:
            mended[each.node, each.event.place] = each.event.at
    if not mended:
        return list(events)

    def judge(each: Counted) -> Counted:
        at = max(mended.get((each.node, ""), 0.0), mended.get((each.node, each.event.place), 0.0))
        return replace(each, why_not="it was mended since") if not each.why_not and each.event.at <= at else each

    return [judge(each) for each in events]


def _crowds(events: Sequence[Counted]) -> list[Counted]:
    """Without those of kinds that several nodes had in one moment."""
    by_kind: dict[str, list[Counted]] = defaultdict(list)
    for each in events:
        if not each.why_not and each.event.kind not in (NodeEventKind.TEST_FAILED, NodeEventKind.RESTART_HELPED):
            by_kind[each.event.kind].append(each)
    shared: dict[str, int] = {}
    for alike in by_kind.values():
        dates = [each.event.at for each in alike]
        for each in alike:
            low, high = bisect_left(dates, each.event.at - CROWD_S), bisect_right(dates, each.event.at + CROWD_S)
            if high - low >= CROWD_NODES:
                nodes = {other.node for other in alike[low:high]}
                if len(nodes) >= CROWD_NODES:
                    shared[each.event.key] = len(nodes)
    return [
        replace(each, why_not=f"{shared[each.event.key]} nodes had it at once: what they share is to blame")
        if each.event.key in shared
        else each
        for each in events
    ]


def _travelling(events: Sequence[Counted]) -> list[Counted]:
    """Without those that one job had on one node after the other, where the evidence is not of the hardware."""
    by_job: dict[tuple[str, str], list[Counted]] = defaultdict(list)
    for each in events:
        if each.event.chain and each.strength < 1.0 and not each.why_not:
            by_job[each.event.chain, each.event.kind].append(each)
    dates_of = {key: [each.event.at for each in alike] for key, alike in by_job.items()}

    def judge(each: Counted) -> Counted:
        alike = by_job.get((each.event.chain, each.event.kind), ()) if each.event.chain else ()
        if len(alike) < TRAVELS or each.why_not or each.strength >= 1.0:
            return each
        dates, at = dates_of[each.event.chain, each.event.kind], each.event.at
        near = alike[bisect_left(dates, at - WINDOW_S) : bisect_right(dates, at + WINDOW_S)]
        if len(near) < TRAVELS:
            return each
        here = sum(other.node == each.node for other in near)
        if 2 * here > len(near):
            return each
        return replace(each, why_not=f"the same job had it {len(near) - here} times on other nodes: it takes it along")

    return [judge(each) for each in events]


def _one_fault(events: Sequence[Counted]) -> list[Counted]:
    """Events of one incident, and of one node within SAME_S, count once: the strongest of them."""
    groups: dict[str, list[list[Counted]]] = defaultdict(list)
    for each in events:
        if each.why_not:
            continue
        of_node = groups[each.node]
        same = next((group for group in reversed(of_node) if _is_same(group, each)), None)
        if same is None:
            of_node.append([each])
        else:
            same.append(each)
    dropped: dict[str, str] = {}
    for group in (group for of_node in groups.values() for group in of_node if len(group) > 1):
        first = max(group, key=lambda each: (each.strength, bool(each.event.place), -each.event.at))
        for each in group:
            if each is not first:
                dropped[each.event.key] = f"part of the same fault as: {first.event.what[:80]}"
    return [replace(each, why_not=dropped[each.event.key]) if each.event.key in dropped else each for each in events]


def _is_same(group: Sequence[Counted], each: Counted) -> bool:
    event, age_s = each.event, each.event.at - group[0].event.at
    kinds = {event.kind, *(other.event.kind for other in group)}
    if kinds <= CONFIRMED and NodeEventKind.TEST_FAILED in kinds and len(kinds) > 1:
        return False
    if age_s <= SAME_S or (event.incident_id and any(other.event.incident_id == event.incident_id for other in group)):
        return True
    return age_s <= DAY_S and event.chain != "" and all(_soft_of(other, event.chain) for other in (*group, each))


def _soft_of(each: Counted, chain: str) -> bool:
    """Whether it is of this job and no proof: a program at fault does it again within hours, in the same place."""
    return each.event.chain == chain and each.strength < 1.0
