"""How suspicious each node is by what it has done before. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from slurm_watchdog.ledger.counted import WINDOW_S, Counted, counted
from slurm_watchdog.model.node_events import NodeEvent

SAY_FROM: Final = 3
"""The third event within WINDOW_S is said."""
SUSPECT_FROM: Final = 2.25
"""A suspicion from here on is more than chance: see UNKNOWN_PART."""
UNKNOWN_PART: Final = 0.6
"""What an event whose part is not known adds to the suspicion of the others; one of another part adds nothing: a bad
node repeats itself in one part. Both figures are what names lemons best in tests/simulation/lemons.py."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is to be said against one node at one moment."""

    node: str
    score: float
    """The weights of its events, those of its worst part in full; 0: nothing."""
    place: str
    """That part; empty: the node as a whole."""
    recent: int
    """Events within WINDOW_S that count."""
    counted: tuple[Counted, ...]
    """Those that count, newest first."""
    last_at: float | None
    """Date of the newest of them."""


def by_node(
    events: Iterable[NodeEvent],
    gpu_nodes: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> dict[str, list[Counted]]:
    """Node -> its events, oldest first, with those that do not count."""
    found: dict[str, list[Counted]] = defaultdict(list)
    for each in counted(events, gpu_nodes or {}, renamed or {}):
        found[each.node].append(each)
    return dict(found)


def suspicion_of(node: str, events: Iterable[Counted], now: float) -> Suspicion:
    """The suspicion of a node at the date `now`, from its own events."""
    standing = [each for each in events if not each.why_not and each.event.at <= now]
    weights: dict[str, float] = defaultdict(float)
    for each in standing:
        weights[each.event.place] += each.weight(now)
    score, place = 0.0, ""
    for part, own in sorted(weights.items()):
        value = own if part == "" else own + UNKNOWN_PART * weights.get("", 0.0)
        if value > score:
            score, place = value, part
    standing.reverse()
    recent = sum(1 for each in standing if now - each.event.at <= WINDOW_S)
    last_at = standing[0].event.at if standing else None
    return Suspicion(node, score, place, recent, tuple(standing), last_at)


def suspicions(nodes: Mapping[str, Iterable[Counted]], now: float) -> list[Suspicion]:
    """Of every node that anything is to be said against, the worst first."""
    found = [suspicion_of(node, events, now) for node, events in nodes.items()]
    return sorted((each for each in found if each.score > 0), key=lambda each: (-each.score, each.node))
