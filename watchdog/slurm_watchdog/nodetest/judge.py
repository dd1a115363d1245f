"""Which nodes are slow or broken, from what was measured on each and between them. Pure.

A figure is held against floors that the site set, against nodes that are alike, and against the node's own past. What
is missing, disturbed, or the same everywhere convicts no one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_test import NodeVerdict
from slurm_watchdog.nodetest.lines import Figure, Measured

LEAST_PEERS: Final = 4
"""With fewer, one bad node among them moves the median."""
LEAST_PAST: Final = 3
"""Earlier tests of a node that make its usual figure."""
MADS, SPREADS, SCALE, TINY = 5.0, 3.0, 1.4826, 1e-9
"""A figure has to be so many scaled median absolute deviations (of logarithms) away: one in a million of a normal
distribution is; and so many times the spread of its own repetitions. SCALE makes the MAD a standard deviation."""
MOST_OTHERS: Final = 0.25
"""Share of the other nodes that may have the same doubt: with more it is how the site is set up (a judgement)."""
Floors = Mapping[str, float]
"""Name or key of a figure to the worst value that the site accepts, in the figure's unit."""
Past = Mapping[str, Sequence[Mapping[str, float]]]
"""Node to the figures of its earlier tests."""
Pair = tuple[str, str]


def judge_nodes(
    nodes: Sequence[Measured], floors: Floors, past: Past, again: Sequence[Measured] = ()
) -> list[NodeVerdict]:
    """A verdict for each node, from its own figures alone.

    `again`: what a second look measured of some of the nodes, all at that later time. A node is worse than its peers
    only if it is worse than what they had in either look: what they share (a filesystem, a host) may be slower for a
    while."""
    return [_judge(node, nodes, floors, past.get(node.name, ()), again) for node in nodes]


def _judge(
    node: Measured, nodes: Sequence[Measured], floors: Floors, past: Sequence[Mapping[str, float]],
    again: Sequence[Measured],
) -> NodeVerdict:  # fmt: skip
    others = [each for each in nodes if each.name != node.name]
    peers, later = peers_of(node, nodes), peers_of(node, again)
    bad, unsure, compared = _problems(node, others), list[str](), False
    for each in node.faults:
        same = sum(any((e.same or e.what) == (each.same or each.what) for e in other.faults) for other in others)
        if each.sure:
            bad.append((each.place, each.what))
        elif same <= MOST_OTHERS * len(others):
            unsure.append(each.what)
    for figure in node.figures.values():
        values = values_of(figure, node, peers)
        worse, was_compared = worse_than(figure, values, floors, f"on {len(values)} peers")
        if worse and len(now := values_of(figure, node, later)) >= LEAST_PEERS:
            worse, _ = worse_than(figure, now, floors, f"on {len(now)} peers")
        was = [each[figure.key] for each in past if figure.key in each] if "past" in figure.against else []
        if not worse and len(was) >= LEAST_PAST and _is_worse_now(figure, values):
            worse = _against(figure, was, "in its earlier tests")
        compared = compared or was_compared or len(was) >= LEAST_PAST
        if worse:
            bad.append((figure.place, f"{_title(figure)} is {worse}"))
    unsure = [*unsure, *_unsure(node, compared=compared, peers=len(peers))]
    return NodeVerdict(
        node=node.name, truth=Truth.BAD if bad else Truth.UNKNOWN if unsure else Truth.OK, faults=tuple(bad),
        unsure=() if bad else tuple(unsure), peers=len(peers), measured=places_of(node),
        figures=", ".join(f"{each.column} {each.shown()}" for each in node.figures.values() if each.column),
    )  # fmt: skip


def places_of(found: Measured) -> tuple[str, ...]:
    """Parts of the node that were measured: what is only counted has no unit."""
    return tuple(sorted({each.place for each in found.figures.values() if each.place and each.unit}))


def peers_of(node: Measured, nodes: Sequence[Measured]) -> list[Measured]:
    """The others that are alike and of which something was measured."""
    return [each for each in nodes if each.name != node.name and each.like == node.like and each.figures]


def values_of(figure: Figure, node: Measured, peers: Sequence[Measured]) -> list[float]:
    """What there is to compare a figure with; nothing where another node is built with as little."""
    if "peers" not in figure.against:
        return []
    found = [
        each.value for other in ([node] if figure.siblings else []) + list(peers) for each in other.figures.values()
        if each is not figure and each.name == figure.name and each.like == figure.like
        and (figure.siblings or each.about == figure.about)
    ]  # fmt: skip
    return [] if figure.sole and any(_behind(figure, each) <= 0 for each in found) else found


def worse_than(figure: Figure, others: Sequence[float], floors: Floors, where: str) -> tuple[str, bool]:
    """(in what it is worse, a part of a sentence, or nothing; whether there was something to compare it with)."""
    floor = floors.get(figure.key, floors.get(figure.name))
    if floor is not None and (figure.value < floor if figure.more else figure.value > floor):
        bound = "at least" if figure.more else "at most"
        return f"{figure.shown()}, and the site wants {bound} {figure.shown(floor)}", True
    if len(others) < LEAST_PEERS:
        return "", floor is not None
    return _against(figure, others, where), True


def _behind(figure: Figure, other: float) -> float:
    """By how much it is worse than another value, as a logarithm: rates of disks differ by factors."""
    ratio = max(other, TINY) / max(figure.value, TINY)
    return math.log(ratio if figure.more else 1 / ratio)


def _against(figure: Figure, others: Sequence[float], where: str) -> str:
    middle = statistics.median(others)
    if middle <= 0 or figure.value < 0 or min(others) <= 0:
        return ""
    deviation = SCALE * statistics.median(abs(math.log(each / middle)) for each in others)
    least = -math.log(max(TINY, 1 - figure.least)) if figure.more else math.log(1 + figure.least)
    is_near = _behind(figure, middle) <= max(least, MADS * deviation, SPREADS * figure.spread)
    if is_near or abs(figure.value - middle) <= figure.absolute:
        return ""
    how = f"{1 - figure.value / middle:.0%} less than" if figure.more else f"{figure.value / middle:.1f} times"
    return f"{figure.shown()}, {how} the {figure.shown(middle)} {where}"


def _is_worse_now(figure: Figure, others: Sequence[float]) -> bool:
    """Whether its past may count: where it is as good as its peers now it is not slow, whatever it was."""
    if len(others) < LEAST_PEERS:
        return True
    behind = statistics.median(others) - figure.value
    return (behind if figure.more else -behind) > figure.least * statistics.median(others) / 2


def _problems(node: Measured, others: Sequence[Measured]) -> list[tuple[str, str]]:
    """Parts that ended badly here. What fails for as many of the others is no node's fault, and a shared directory that
    fails is a node's only where it answers another one."""
    found = []
    for each in node.problems:
        same = sum(any(other_one.where == each.where for other_one in other.problems) for other in others)
        answered = len(others) - same - sum(bool(other.missing) for other in others)
        is_own = each.state == "late" and each.part != "mount"
        if (not same or 2 * same < len(others)) and (is_own or answered > 0):
            found.append((f"{each.part}:{each.about}" if each.about else each.part, f"{each.where}: {each.said}"))
    return found


def _unsure(node: Measured, *, compared: bool, peers: int) -> list[str]:
    """Why a node against which nothing was found is not said to be well."""
    if node.missing:
        return [node.missing]
    found = [f"{each.where}: {each.said}" for each in node.problems]
    if node.disturbed:
        found.append(f"other programs used it meanwhile, so figures of {', '.join(node.disturbed)} do not count")
    if not compared and not found:
        found.append(
            f"nothing to compare it with: {peers} peers that are alike, and {LEAST_PEERS} are needed, or "
            f"{LEAST_PAST} earlier tests"
        )
    return found


def _title(figure: Figure) -> str:
    return f"{figure.title or figure.name} of {figure.about}" if figure.about else figure.title or figure.name


# ---------------------------------------------------------------------------------------------- pairs


class SlowPair(Struct, frozen=True, kw_only=True):
    """Two nodes between which something is wrong."""

    nodes: Pair
    reasons: tuple[str, ...]
    place: str = "link"
    culprit: str = ""
    """Which of the two, if another pair told."""

    def beside(self, node: str) -> str:
        """The other one."""
        return self.nodes[1] if self.nodes[0] == node else self.nodes[0]


def ring(nodes: Sequence[str]) -> list[Pair]:
    """Each node with the next one, the last with the first: two pairs for each node, from three nodes on. Those with an
    even place come first, so that a round has every node once."""
    around = [(node, nodes[(at + 1) % len(nodes)]) for at, node in enumerate(nodes)]
    around = around[: 0 if len(nodes) < 2 else 1 if len(nodes) == 2 else None]
    return around[::2] + around[1::2]


def pair_of(found: Measured) -> Pair:
    """Of a pair's name."""
    first, _, second = found.name.partition(" ")
    return first, second


def judge_pairs(pairs: Sequence[Measured], floors: Floors) -> list[SlowPair]:
    """The pairs with which something is wrong. A node is named for it if another pair of it is bad as well, and the
    other one has a pair that is well."""
    slow: dict[Pair, tuple[str, ...]] = {}
    for pair in pairs:
        others = [each for each in pairs if each.name != pair.name]
        found = [each.said for each in pair.problems][:1]
        found = found if 2 * sum(bool(each.figures) for each in others) > len(others) else []
        for figure in pair.figures.values():
            values = [each.figures[figure.key].value for each in others if figure.key in each.figures]
            worse, _ = worse_than(figure, values, floors, f"on {len(values)} other pairs")
            found += [f"{figure.title or figure.name} {worse}"] if worse else []
        if found:
            slow[pair_of(pair)] = tuple(found)
    tested = [pair_of(each) for each in pairs if not each.missing]
    guilty = {node for pair in slow for node in pair if _is_culprit(node, slow, tested)}
    places = {place for each in pairs for place in places_of(each)}
    return [
        SlowPair(
            nodes=pair, reasons=reasons, place=places.copy().pop() if len(places) == 1 else "link",
            culprit=min(guilty & set(pair)) if len(guilty & set(pair)) == 1 else "",
        )
        for pair, reasons in slow.items()
    ]  # fmt: skip


def _is_culprit(node: str, slow: Collection[Pair], tested: Sequence[Pair]) -> bool:
    partners = {other for pair in tested if pair in slow and node in pair for other in pair if other != node}
    cleared = [other for other in partners if any(other in pair and pair not in slow for pair in tested)]
    return len(partners) >= 2 and bool(cleared)


def with_links(
    verdicts: Sequence[NodeVerdict], slow: Sequence[SlowPair], links: Sequence[Measured], asked: Sequence[Pair]
) -> list[NodeVerdict]:
    """The verdicts, with what is wrong between nodes."""
    unclear = {node: pair for pair in slow if not pair.culprit for node in pair.nodes}
    places = {node: places_of(link) for link in links if not link.missing for node in pair_of(link)}
    found = []
    for each in verdicts:
        faults = tuple(
            (pair.place, f"to {pair.beside(each.node)}: {'; '.join(pair.reasons)}")
            for pair in slow if pair.culprit == each.node
        )  # fmt: skip
        pair = unclear.get(each.node)
        doubts = list[str]()
        if pair is not None:
            doubts = [
                f"to {pair.beside(each.node)}: {'; '.join(pair.reasons)}; which of the two it is, no other pair tells"
            ]
        elif each.truth is Truth.OK and any(each.node in two for two in asked) and each.node not in places:
            doubts = ["its network was not measured"]
        if faults:
            each = replace(each, truth=Truth.BAD, faults=(*each.faults, *faults), unsure=())
        elif doubts and each.truth is not Truth.BAD:
            each = replace(each, truth=Truth.UNKNOWN, unsure=(*each.unsure, *doubts))
        found.append(replace(each, measured=(*each.measured, *places.get(each.node, ()))))
    return found
