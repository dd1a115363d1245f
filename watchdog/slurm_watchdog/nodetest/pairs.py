"""Which node makes pairs slow: named only where a second pair tells which of the two it is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.node_figures import CLOCK_S, KINDS
from slurm_watchdog.nodetest.judge import Floors, values_of, worse_than
from slurm_watchdog.nodetest.results import Fault, Measured

Pair = tuple[str, str]


class SlowPair(Struct, frozen=True, kw_only=True):
    """Two nodes between which something is wrong."""

    nodes: Pair
    reasons: tuple[str, ...]
    about_clock: bool = False
    interface: str = ""
    """Of the fabric."""
    culprit: str = ""
    """Which of the two, if another pair told."""


def ring(nodes: Sequence[str]) -> list[Pair]:
    """Each node with the next one, the last with the first: two pairs for each node, from three nodes on. Those with an
    even place come first, so that a round has every node once."""
    if len(nodes) < 2:
        return []
    around = [(node, nodes[(at + 1) % len(nodes)]) for at, node in enumerate(nodes)]
    around = around[:1] if len(nodes) == 2 else around
    return around[::2] + around[1::2]


def pair_of(measured: Measured) -> Pair:
    """Of a pair's name."""
    first, _, second = measured.name.partition(" ")
    return first, second


def judge_pairs(pairs: Sequence[Measured], floors: Floors) -> list[SlowPair]:
    """The pairs with which something is wrong, and who it is where that can be told."""
    slow, skewed = {}, {}
    for pair in pairs:
        if reasons := _reasons(pair, pairs, floors):
            slow[pair_of(pair)] = tuple(reasons)
        ahead = pair.facts.get("pair", {})
        ahead_s, within_s = ahead.get("clock_ahead_s"), ahead.get("clock_within_s")
        if isinstance(ahead_s, float) and isinstance(within_s, float) and abs(ahead_s) - within_s > CLOCK_S:
            skewed[pair_of(pair)] = (f"their clocks differ by {abs(ahead_s):.1f} s",)
    tested = [pair_of(each) for each in pairs if not each.missing]
    interfaces = {
        str(value) for each in pairs for name, value in each.facts.get("pair", {}).items() if "interface" in name
    }
    found = [*_named(slow, tested, about_clock=False), *_named(skewed, tested, about_clock=True)]
    if len(interfaces) != 1:
        return found
    (interface,) = interfaces
    return [replace(each, interface=interface) for each in found]


def _reasons(pair: Measured, pairs: Sequence[Measured], floors: Floors) -> list[str]:
    others = [each for each in pairs if each.name != pair.name]
    bad = [each.said for each in pair.problems if each.phase == "pair"]
    well = sum(bool(each.figures) for each in others)
    found = [bad[0]] if bad and 2 * well > len(others) else []
    for key in pair.figures:
        kind = KINDS[key]
        worse, _ = worse_than(key, pair, kind, values_of(key, pair, others), floors)
        found += [f"{kind.title} {worse}".replace("peers", "other pairs")] if worse else []
    return found


def _named(bad: Mapping[Pair, tuple[str, ...]], tested: Sequence[Pair], *, about_clock: bool) -> list[SlowPair]:
    """A node is the culprit of a bad pair if another pair of it is bad as well, and the other one has a pair that is
    well."""
    guilty = {node for pair in bad for node in pair if _is_culprit(node, bad.keys(), tested)}
    found = []
    for pair, reasons in bad.items():
        culprits = [node for node in pair if node in guilty]
        one = culprits[0] if len(culprits) == 1 else ""
        found.append(SlowPair(nodes=pair, reasons=reasons, about_clock=about_clock, culprit=one))
    return found


def _is_culprit(node: str, bad: Collection[Pair], tested: Sequence[Pair]) -> bool:
    wrong = [pair for pair in tested if pair in bad]
    mine = [pair for pair in wrong if node in pair]
    partners = {other for pair in mine for other in pair if other != node}
    cleared = {
        other for other in partners
        if any(other in pair and pair not in wrong for pair in tested)
    }  # fmt: skip
    return len(partners) >= 2 and bool(cleared)


def culprits(slow: Sequence[SlowPair]) -> dict[str, list[Fault]]:
    """Node to what is wrong with its link or clock, parts of sentences; pairs of which none is known are left out."""
    found: dict[str, list[Fault]] = {}
    for pair in slow:
        if pair.culprit:
            other = pair.nodes[1] if pair.nodes[0] == pair.culprit else pair.nodes[0]
            place = "clock" if pair.about_clock else f"link:{pair.interface}" if pair.interface else "link"
            what = f"to {other}: {'; '.join(pair.reasons)}"
            found.setdefault(pair.culprit, []).append(Fault(place=place, what=what))
    return found
