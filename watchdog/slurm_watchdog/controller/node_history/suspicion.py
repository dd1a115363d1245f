"""How suspicious each node is by what it has done before: which events are held against their node, how much each
weighs, and why the others are not. Computed from events, never stored. Pure.

An event may turn out to be no one's: its incident is explained by another one, many nodes had the same in one
moment, or it moves from node to node with one job. Each rule here takes events away, and says why.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from msgspec import structs

from slurm_watchdog.analysis.slurm_nodes import CROWD_NODES, CROWD_S
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import duration, one_line
from slurm_watchdog.controller.policy.access import Operators, Person
from slurm_watchdog.detect.node_rules import SUSPECT_FROM
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.model.incidents import Culprit, Finding, Incident, IncidentState
from slurm_watchdog.model.node_events import (
    LINK_PLACE,
    MOUNT_PLACE,
    NodeEvent,
    NodeEventKind,
    NodeEventRequest,
    NodeHistory,
    NodeSuspicion,
    NodeTable,
    PastEvent,
)

DAY_S = 86400.0
WINDOW_S = 14 * DAY_S
"""Events of so long are counted for people. Meta's search for lemon nodes looks at twice that time (28 days: A. Kokolis
et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, arXiv:2410.21680)."""
HALF_LIFE_S = 28 * DAY_S  # It weighs half after this time, and after half a year nothing.
FORGOTTEN_S = 6 * HALF_LIFE_S  # An event weighs a sixty-fourth then: it is history.
TRAVELS = 3  # A job that had the same so often within WINDOW_S, and half of it or more elsewhere, takes it along.
SAME_S = 1800.0
"""What one fault sets off on its node (a dead rank, Slurm's ping, its drain) comes within SlurmdTimeout (300 s by
default) and a restart of the node."""
UNKNOWN_PART = 0.6
"""What an event whose part is not known adds to the suspicion of the others; one of another part adds nothing: a bad
node repeats itself in one part. Both figures are what names lemons best in tests/simulation/lemons.py."""
MOST_NODES = 2  # An incident that names more nodes than this knows of a trouble, and not of a bad node.
MAX_SAID, MAX_WHAT = 6, 400  # Events in one line; characters of a sentence: a summary is half as long.

SHOWN_NODES = 200  # Of a cluster's suspicious nodes, the worst first.
SHOWN_EVENTS = 500
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/+-]{0,127}")
ADDED = frozenset({NodeEventKind.TEST_FAILED, NodeEventKind.TEST_PASSED, NodeEventKind.MENDED})
USERS_OWN = {
    NodeEventKind.TEST_FAILED: NodeEventKind.USER_TEST_FAILED,
    NodeEventKind.TEST_PASSED: NodeEventKind.USER_TEST_PASSED,
}
"""What becomes of the result of a test that no operator has run."""

CONFIRMED = frozenset({NodeEventKind.SLOWED_JOB, NodeEventKind.SLOWED_ONCE, NodeEventKind.TEST_FAILED})
"""A test that fails soon after the search for a slow node is no part of the same: it was asked for to confirm it."""
OWN_KINDS = frozenset(NodeEventKind)


def strength_of(kind: str) -> float:
    """How strongly a kind speaks against a node. Of an incident its detector declares it."""
    return NodeEventKind(kind).strength if kind in OWN_KINDS else spec_of(kind).blames_node


def kind_words(kind: str) -> str:
    """An event of this kind, for everybody."""
    return NodeEventKind(kind).words if kind in OWN_KINDS else spec_of(kind).sentence


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


NONE: Mapping[str, str] = MappingProxyType({})


def by_node(
    events: Iterable[NodeEvent], gpu_nodes: Mapping[str, str] = NONE, renamed: Mapping[str, str] = NONE
) -> dict[str, list[Counted]]:
    """Node -> its events with what they count for, oldest first. `gpu_nodes`: GPU's UUID -> the node that it is in now,
    as far as is known: its events follow it. `renamed`: a node's name before -> its name now."""

    def home(event: NodeEvent) -> str:
        return gpu_nodes.get(event.place, renamed.get(event.node, event.node))

    found, ordered = list[Counted](), sorted(events, key=lambda each: (each.at, each.key))
    mended = {(home(each), each.place): each.at for each in ordered if each.kind == NodeEventKind.MENDED}
    for event in ordered:
        node, strength = home(event), strength_of(event.kind)
        why_not = event.withdrawn_why or ("" if strength > 0 else "it is not evidence against the node")
        if not why_not and event.at <= max(mended.get((node, part), 0.0) for part in ("", event.place)):
            why_not = "it was repaired since"
        found.append(Counted(event, node, strength, why_not))
    for rule in (_crowds, _travelling, _one_fault):
        why = rule([each for each in found if not each.why_not])
        found = [replace(each, why_not=why[each.event.key]) if each.event.key in why else each for each in found]
    return _grouped(found, lambda each: each.node)


K = TypeVar("K", bound=Hashable)


def _grouped(events: Iterable[Counted], key: Callable[[Counted], K]) -> dict[K, list[Counted]]:
    found: dict[K, list[Counted]] = defaultdict(list)
    for each in events:
        found[key(each)].append(each)
    return dict(found)


def _near(alike: Sequence[Counted], span_s: float) -> Iterator[tuple[Counted, Sequence[Counted]]]:
    """Each with all of them that are at most so long before or after it; `alike` is oldest first."""
    dates = [each.event.at for each in alike]
    for each in alike:
        at = each.event.at
        yield each, alike[bisect_left(dates, at - span_s) : bisect_right(dates, at + span_s)]


def _crowds(events: Iterable[Counted]) -> dict[str, str]:
    """Those of kinds that several nodes had in one moment."""
    found, own = dict[str, str](), (NodeEventKind.TEST_FAILED, NodeEventKind.RESTART_HELPED)
    for kind, alike in _grouped(events, lambda each: each.event.kind).items():
        for each, near in _near(alike, CROWD_S) if kind not in own else ():
            if len(near) >= CROWD_NODES and (number := len({other.node for other in near})) >= CROWD_NODES:
                found[each.event.key] = f"{number} nodes had it at once: what they share is to blame"
    return found


def _travelling(events: Iterable[Counted]) -> dict[str, str]:
    """Those that one job had on one node after the other, where the evidence is not of the hardware."""
    found, soft = dict[str, str](), [each for each in events if each.event.chain and each.strength < 1.0]
    for alike in _grouped(soft, lambda each: (each.event.chain, each.event.kind)).values():
        for each, near in _near(alike, WINDOW_S) if len(alike) >= TRAVELS else ():
            there = sum(other.node != each.node for other in near)
            if len(near) >= TRAVELS and 2 * there >= len(near):
                found[each.event.key] = f"the same job had it {there} times on other nodes: it takes it along"
    return found


def _one_fault(events: Iterable[Counted]) -> dict[str, str]:
    """Events of one incident, and of one node within SAME_S, count once: the strongest of them."""
    found = dict[str, str]()
    for of_node in _grouped(events, lambda each: each.node).values():
        groups: list[list[Counted]] = []
        for each in of_node:
            same = next((group for group in reversed(groups) if _is_same(group, each)), None)
            if same is None:
                groups.append([each])
            else:
                same.append(each)
        for group in groups:
            first = max(group, key=lambda each: (each.strength, bool(each.event.place), -each.event.at))
            why = f"part of the same fault as: {first.event.what[:80]}"
            found |= {each.event.key: why for each in group if each is not first}
    return found


def _is_same(group: Sequence[Counted], each: Counted) -> bool:
    event, age_s = each.event, each.event.at - group[0].event.at
    kinds = {event.kind, *(other.event.kind for other in group)}
    if kinds <= CONFIRMED and NodeEventKind.TEST_FAILED in kinds and len(kinds) > 1:
        return False
    if age_s <= SAME_S or (event.incident_id and any(other.event.incident_id == event.incident_id for other in group)):
        return True
    # A program at fault does it again within hours, in the same place.
    soft = all(other.event.chain == event.chain and other.strength < 1.0 for other in (*group, each))
    return age_s <= DAY_S and event.chain != "" and soft


def suspicion_of(node: str, events: Iterable[Counted], now: float) -> NodeSuspicion:
    """The suspicion of a node at the date `now`, from its own events, oldest first."""
    standing = [each for each in events if not each.why_not and each.event.at <= now][::-1]
    weights: dict[str, float] = defaultdict(float)
    for each in standing:
        weights[each.event.place] += each.weight(now)
    whole = UNKNOWN_PART * weights.get("", 0.0)
    scores = {part: own + (whole if part else 0.0) for part, own in sorted(weights.items())}
    place = max(scores, key=lambda part: scores[part], default="")
    more = [f"and {len(standing) - MAX_SAID} more"] * (len(standing) > MAX_SAID)
    return NodeSuspicion(
        node=node,
        score=(score := round(scores.get(place, 0.0), 3)),
        suspect=score >= SUSPECT_FROM,
        place=place,
        recent=sum(now - each.event.at <= WINDOW_S for each in standing),
        events=len(standing),
        last_at=standing[0].event.at if standing else None,
        reasons="; ".join([*(event_words(each, node, now) for each in standing[:MAX_SAID]), *more]),
    )


def suspicions(nodes: Mapping[str, Iterable[Counted]], now: float) -> list[NodeSuspicion]:
    """Of every node that anything is to be said against, the worst first."""
    found = [suspicion_of(node, events, now) for node, events in nodes.items()]
    return sorted((each for each in found if each.score > 0), key=lambda each: (-each.score, each.node))


def event_words(each: Counted, node: str, now: float) -> str:
    """An event in words, in the history of `node`, for everybody."""
    event = each.event
    incident = f" (incident {event.incident_id})" if event.incident_id else ""
    where = f", in {event.node}" if event.node != node else ""
    return f"{kind_words(event.kind)} {duration(now - event.at)} ago{where}{incident}"


def blamed(about: Incident | Finding) -> tuple[tuple[str, str], ...]:
    """(node, part of it or nothing) of each place that an incident or a finding is held against. Of a kind that is
    about jobs these are the nodes that it names as culprits or that a restart should avoid: a node that only ran the
    job is in neither."""
    spec, places = spec_of(about.kind), dict[str, str]()
    if spec.blames_node <= 0:
        return ()
    of_node = spec.subject in (Subject.NODE, Subject.GPU)
    for culprit in about.culprits if of_node or not about.mounts else ():
        if culprit.node:
            places[culprit.node] = places.get(culprit.node) or _part_of(culprit)
    for node in about.exclude_nodes:
        places.setdefault(node, MOUNT_PLACE + about.mounts[0] if len(about.mounts) == 1 else "")
    return tuple(sorted(places.items())) if len(places) <= MOST_NODES else ()


def _part_of(culprit: Culprit) -> str:
    link = LINK_PLACE + culprit.link.partition("/")[0] if culprit.link else ""  # as the kernel names the adapter
    return culprit.gpu_uuid or link or (MOUNT_PLACE + culprit.mount if culprit.mount else "")


def events_of(incident: Incident, chain: str, *, compared: bool) -> tuple[NodeEvent, ...]:
    """The events that an incident is: one for each node that it is held against; none while it is only suspected, and
    none where another incident explains it. `chain`: see NodeEvent. `compared`: its job ran on several nodes. On a
    single one whatever the program does wrong happens there, which says nothing of the node unless its hardware is
    proven broken."""
    spec = spec_of(incident.kind)
    alone = spec.subject is Subject.JOB and spec.blames_node < 1.0 and not compared
    if incident.state is IncidentState.PENDING or incident.inhibited_by is not None or alone:
        return ()
    return tuple(
        NodeEvent(
            key=f"incident:{incident.id}:{node}",
            node=node,
            kind=incident.kind,
            at=incident.opened_at,
            what=incident.summary[:MAX_WHAT],
            place=place,
            job_id=incident.job_ids[0] if incident.job_ids else "",
            chain=chain,
            incident_id=incident.id,
        )
        for node, place in blamed(incident)
    )


# ---------------------------------------------------------------------------------------------- people


def node_table(found: Sequence[NodeSuspicion], *, sees: bool) -> NodeTable:
    """Every node that anything is to be said against, the worst first; paths of mounts only for those who `sees`."""
    return NodeTable(
        suspect_from=SUSPECT_FROM,
        suspects=sum(each.suspect for each in found),
        known=len(found),
        nodes=tuple(structs.replace(each, place=_place(each, sees)) for each in found[:SHOWN_NODES]),
    )


def node_history(node: str, events: Sequence[Counted], now: float, person: Person, operators: Operators) -> NodeHistory:
    """One node with its history, newest first: whole sentences for those who may see them."""
    found, whole = suspicion_of(node, [each for each in events if each.node == node], now), operators.include(person)
    own = f"{person.uid}/"  # the chains of jobs of the person who asks
    return picked(
        NodeHistory, found, suspect_from=SUSPECT_FROM, place=_place(found, whole),
        history=tuple(
            _past_event(each, node, now, whole or each.event.chain.startswith(own))
            for each in reversed(events[-SHOWN_EVENTS:])
        ),
    )  # fmt: skip


def _past_event(each: Counted, node: str, now: float, sees: bool) -> PastEvent:
    event = each.event
    return picked(
        PastEvent, event, "at", "kind", "node", "job_id", "incident_id",
        what=event.what if sees else f"{kind_words(event.kind)}.",
        place=_place(event, sees),
        counts_for=each.node,
        weight=round(each.weight(now), 3) if each.node == node else 0.0,
        why_not=each.why_not if sees else each.why_not.partition(":")[0],
    )  # fmt: skip


def _place(of: NodeSuspicion | NodeEvent, sees: bool) -> str:
    """A mount is a path, which a user may have named: no text of a user is in it, unless the caller `sees`."""
    return MOUNT_PLACE.rstrip(":") if of.place.startswith(MOUNT_PLACE) and not sees else of.place


def event_of(node: str, given: NodeEventRequest, now: float, by: str, *, is_operator: bool) -> NodeEvent:
    """The event that a person or a test adds to a node. A user's own test is kept to be read, and counts for
    nothing: anybody could say so of anything. Raises ValueError."""
    words = (given.id, given.place) if given.place else (given.id,)
    if given.kind not in ADDED or not given.what.strip() or not all(map(_WORD.fullmatch, words)):
        raise ValueError(
            f"kind has to be one of {', '.join(sorted(ADDED))}; id a word that names this test, or this repair, and no "
            "other; place, if any, the part of the node: a GPU's UUID, mount:/path, or a word; and what a sentence"
        )
    kind = NodeEventKind(given.kind)
    return NodeEvent(
        key=f"{kind}:{by}:{given.id}:{node}:{given.place}",
        node=node,
        kind=kind if is_operator else USERS_OWN[kind],
        at=now,
        what=f"{one_line(given.what, MAX_WHAT - 60)} (by {by[:40]})",
        place=given.place,
    )
