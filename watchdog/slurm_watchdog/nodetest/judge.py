"""Which nodes are slow or broken, from the lines of JSON that the node test prints (deploy/node-test/node_test.py
describes them). Pure.

A figure is held against floors that the site set, against nodes that are alike, and against the node's own past. What
is missing, disturbed, or the same everywhere convicts no one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Truth

MAX_LINE = 1 << 20
Text = Annotated[str, Meta(max_length=4096)]
LEAST_PEERS = 4  # With fewer, one bad node among them moves the median.
LEAST_PAST = 3  # Earlier tests of a node that make its usual figure.
MADS, SPREADS, SCALE, TINY = 5.0, 3.0, 1.4826, 1e-9
"""A figure has to be so many scaled median absolute deviations (of logarithms) away: one in a million of a normal
distribution is; and so many times the spread of its own repetitions. SCALE makes the MAD a standard deviation."""
MOST_OTHERS = 0.25  # Share of the others that may have the same doubt: with more it is the site's set-up.
Floors = Mapping[str, float]  # Name or key of a figure to the worst value that the site accepts, in the figure's unit.
Past = Mapping[str, Sequence[Mapping[str, float]]]  # Node to the figures of its earlier tests.
Pair = tuple[str, str]


class Figure(Struct):
    """What a part has measured, and how it is compared: the fields are described where they are printed."""

    name: Text
    value: float
    title: Text = ""
    unit: Text = ""
    column: Text = ""
    about: Text = ""
    place: Text = ""
    more: bool = True
    least: float = 0.1
    absolute: float = 0.0
    spread: float = 0.0
    disturbed: bool = False
    like: Text = ""
    against: tuple[Text, ...] = ("peers", "past")
    siblings: bool = False
    sole: bool = False

    @property
    def key(self) -> str:
        """Names it among the figures of a node: `mount_write /scratch`."""
        return f"{self.name} {self.about}".strip()

    def shown(self, value: float | None = None) -> str:
        """Its value, or another one of its kind: three digits and the unit."""
        number = self.value if value is None else value
        digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
        text = f"{number:.2g}" if 0 < abs(number) < 0.1 else f"{number:,.{digits}f}"
        return f"{text} {self.unit}".strip()


class Fault(Struct):
    """What a part itself has found wrong."""

    what: Text
    place: Text = ""
    sure: bool = True
    same: Text = ""  # Names the same on other nodes; empty: `what` does.


class Line(Struct):
    """A part has begun, or ended."""

    node: Text
    part: Text
    state: Literal["begun", "ok", "late", "failed"]
    about: Text = ""
    said: Text = ""
    skipped: Text = ""
    like: Text = ""
    figures: tuple[Figure, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def where(self) -> str:
        """The part, in words."""
        return f"{self.part} {self.about}".strip()


class Measured(Struct):
    """What is known of one node, or of one pair (`name` is then `a b`)."""

    name: str
    like: str = ""
    figures: Mapping[str, Figure] = {}
    disturbed: tuple[str, ...] = ()  # Parts of which other programs disturbed a figure.
    problems: tuple[Line, ...] = ()  # Parts that did not end well.
    faults: tuple[Fault, ...] = ()
    missing: str = ""  # Why there is nothing, or not all, a part of a sentence.

    @property
    def hangs(self) -> bool:
        """Whether a part of it has no end."""
        return any(each.state == "late" for each in self.problems)

    @property
    def pair(self) -> tuple[str, str]:
        """The two nodes of a pair."""
        first, _, second = self.name.partition(" ")
        return first, second

    @property
    def places(self) -> tuple[str, ...]:
        """Parts of the node that were measured: what is only counted has no unit."""
        return tuple(sorted({each.place for each in self.figures.values() if each.place and each.unit}))


def parse_line(text: str) -> Line | None:
    """What a line of a job's output says; None: it is none of ours."""
    if not text.startswith("{") or len(text) > MAX_LINE:
        return None
    try:
        return msgspec.json.decode(text, type=Line)
    except (msgspec.MsgspecError, RecursionError):
        return None


def measured(name: str, lines: Iterable[Line], missing: str = "") -> Measured:
    """All lines of one node or pair together. A part that has begun and never ended is late when the job is over."""
    ended, begun = list[Line](), dict[tuple[str, str], Line]()
    for line in lines:
        if line.state == "begun":
            begun[line.node, line.where] = line
        else:
            begun.pop((line.node, line.where), None)
            ended.append(line)
    ended += [replace(each, state="late", said="it began before the job ended") for each in begun.values()]
    figures = [each for line in ended for each in line.figures]
    return Measured(
        name=name,
        like=next((line.like for line in ended if line.like), ""),
        figures={each.key: each for each in figures if not each.disturbed},
        disturbed=tuple(dict.fromkeys(each.place or each.name for each in figures if each.disturbed)),
        problems=tuple(line for line in ended if line.state != "ok"),
        faults=tuple({(each.place, each.what): each for line in ended for each in line.faults}.values()),
        missing=missing,
    )


# ---------------------------------------------------------------------------------------------- nodes


class NodeVerdict(Struct):
    """What a test says of one node."""

    node: str
    truth: Truth
    faults: tuple[tuple[str, str], ...] = ()  # BAD: (part of the node, what is wrong with it, with the figures).
    unsure: tuple[str, ...] = ()  # UNKNOWN: why it was not judged, parts of sentences.
    peers: int = 0  # With which its figures were compared.
    figures: str = ""  # The most telling ones, in words.
    measured: tuple[str, ...] = ()  # Parts with figures: `cpu`, `disk:/tmp`, `mount:/scratch`, `link:eth0`, a UUID.

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not well, in words."""
        return tuple(what for _, what in self.faults) or self.unsure

    @property
    def by_place(self) -> dict[str, str]:
        """Part of the node that is bad -> what is wrong with it."""
        places = dict.fromkeys(place for place, _ in self.faults)
        return {place: "; ".join(what for where, what in self.faults if where == place) for place in places}


def judge_nodes(nodes: Sequence[Measured], floors: Floors, past: Past) -> list[NodeVerdict]:
    """A verdict for each node, from its own figures alone."""
    return [_judge(node, nodes, floors, past.get(node.name, ())) for node in nodes]


def confirmed(first: NodeVerdict, second: NodeVerdict, looked: Measured) -> NodeVerdict:
    """Of the verdicts of two looks at a node what both found, what a part was sure of in the first, `looked`, and what
    only the second could find because other programs disturbed the first."""
    places, sure = second.by_place, {each.what for each in looked.faults if each.sure}
    faults = [(place, what) for place, what in first.faults if place in places or what in sure]
    faults += [(place, what) for place, what in second.faults if place in looked.disturbed and not first.faults]
    if faults:
        return replace(first, truth=Truth.BAD, faults=tuple(faults), unsure=())
    return replace(second, truth=Truth.UNKNOWN, faults=(), unsure=second.reasons) if places else second


def _judge(
    node: Measured, nodes: Sequence[Measured], floors: Floors, past: Sequence[Mapping[str, float]]
) -> NodeVerdict:
    others, peers = [each for each in nodes if each.name != node.name], peers_of(node, nodes)
    bad, unsure, compared = _problems(node, others), list[str](), False
    for each in node.faults:
        same = sum(any((e.same or e.what) == (each.same or each.what) for e in other.faults) for other in others)
        if each.sure:
            bad.append((each.place, each.what))
        elif same <= MOST_OTHERS * len(others):
            unsure.append(each.what)
    for figure in node.figures.values():
        values = _values_of(figure, node, peers)
        was = [each[figure.key] for each in past if figure.key in each] if "past" in figure.against else []
        has_floor = figure.key in floors or figure.name in floors
        compared |= has_floor or len(values) >= LEAST_PEERS or len(was) >= LEAST_PAST
        worse = _worse(figure, floors, values, f"on {len(values)} peers")
        # Where it is as good as its peers now it is not slow, whatever it was.
        is_good = len(values) >= LEAST_PEERS and _behind(figure, statistics.median(values)) <= _least(figure, 0.5)
        if not worse and len(was) >= LEAST_PAST and not is_good:
            worse = _against(figure, was, "in its earlier tests")
        if worse:
            about = f" of {figure.about}" if figure.about else ""
            bad.append((figure.place, f"{figure.title or figure.name}{about} is {worse}"))
    unsure += [node.missing] if node.missing else [f"{each.where}: {each.said}" for each in node.problems]
    if node.disturbed and not node.missing:
        unsure.append(f"other programs used it meanwhile, so figures of {', '.join(node.disturbed)} do not count")
    if not compared and not unsure:
        needed = f"{LEAST_PEERS} are needed, or {LEAST_PAST} earlier tests"
        unsure.append(f"nothing to compare it with: {len(peers)} peers that are alike, and {needed}")
    return NodeVerdict(
        node=node.name,
        truth=Truth.BAD if bad else Truth.UNKNOWN if unsure else Truth.OK,
        faults=tuple(bad),
        unsure=() if bad else tuple(unsure),
        peers=len(peers),
        measured=node.places,
        figures=", ".join(f"{each.column} {each.shown()}" for each in node.figures.values() if each.column),
    )


def peers_of(node: Measured, nodes: Sequence[Measured]) -> list[Measured]:
    """The others that are alike and of which something was measured."""
    return [each for each in nodes if each.name != node.name and each.like == node.like and each.figures]


def _values_of(figure: Figure, node: Measured, peers: Sequence[Measured]) -> list[float]:
    """What there is to compare a figure with; nothing where another node is built with as little."""
    if "peers" not in figure.against:
        return []
    everywhere = [each for other in [node] * figure.siblings + list(peers) for each in other.figures.values()]
    alike = [each for each in everywhere if (each.name, each.like) == (figure.name, figure.like)]
    found = [e.value for e in alike if e is not figure and (figure.siblings or e.about == figure.about)]
    return [] if figure.sole and any(_behind(figure, each) <= 0 for each in found) else found


def _worse(figure: Figure, floors: Floors, others: Sequence[float], where: str) -> str:
    """What is worse than the site accepts, or than `others` if enough: a part of a sentence, or nothing."""
    floor = floors.get(figure.key, floors.get(figure.name, figure.value))
    if figure.value < floor if figure.more else figure.value > floor:
        return f"{figure.shown()}, and the site wants at {'least' if figure.more else 'most'} {figure.shown(floor)}"
    return _against(figure, others, where) if len(others) >= LEAST_PEERS else ""


def _behind(figure: Figure, other: float) -> float:
    """By how much it is worse than another value, as a logarithm: rates of disks differ by factors."""
    ratio = max(other, TINY) / max(figure.value, TINY)
    return math.log(ratio if figure.more else 1 / ratio)


def _least(figure: Figure, part: float) -> float:
    """This part of what it has to be behind at least, as a logarithm."""
    share = figure.least * part
    return -math.log(max(TINY, 1 - share)) if figure.more else math.log(1 + share)


def _against(figure: Figure, others: Sequence[float], where: str) -> str:
    if min(others) <= 0 or figure.value < 0:
        return ""
    middle = statistics.median(others)
    deviation = SCALE * statistics.median(abs(math.log(each / middle)) for each in others)
    is_near = _behind(figure, middle) <= max(_least(figure, 1.0), MADS * deviation, SPREADS * figure.spread)
    if is_near or abs(figure.value - middle) <= figure.absolute:
        return ""
    how = f"{1 - figure.value / middle:.0%} less than" if figure.more else f"{figure.value / middle:.1f} times"
    return f"{figure.shown()}, {how} the {figure.shown(middle)} {where}"


def _problems(node: Measured, others: Sequence[Measured]) -> list[tuple[str, str]]:
    """Parts that ended badly here. What fails for as many of the others is no node's fault, and a shared directory that
    fails is a node's only where it answers another one."""
    found = []
    for each in node.problems:
        same = sum(any(problem.where == each.where for problem in other.problems) for other in others)
        answered = len(others) - same - sum(bool(other.missing) for other in others)
        is_own = each.state == "late" and each.part != "mount"
        if (not same or 2 * same < len(others)) and (is_own or answered > 0):
            found.append((f"{each.part}:{each.about}" if each.about else each.part, f"{each.where}: {each.said}"))
    return found


# ---------------------------------------------------------------------------------------------- pairs


def ring(nodes: Sequence[str]) -> list[Pair]:
    """Each node with the next one, the last with the first: two pairs for each node, from three nodes on. Those with an
    even place come first, so that a round has every node once."""
    around = [(node, nodes[(at + 1) % len(nodes)]) for at, node in enumerate(nodes)]
    around = around[: 0 if len(nodes) < 2 else 1 if len(nodes) == 2 else None]
    return around[::2] + around[1::2]


def slow_pairs(pairs: Sequence[Measured], floors: Floors) -> dict[Pair, str]:
    """The pairs with which something is wrong, and what."""
    slow = {}
    for pair in pairs:
        others = [each for each in pairs if each.name != pair.name]
        most_have = 2 * sum(bool(each.figures) for each in others) > len(others)
        found = [each.said for each in pair.problems[:1] if most_have]
        for figure in pair.figures.values():
            values = [each.figures[figure.key].value for each in others if figure.key in each.figures]
            worse = _worse(figure, floors, values, f"on {len(values)} other pairs")
            found += [f"{figure.title or figure.name} {worse}"] if worse else []
        if found:
            slow[pair.pair] = "; ".join(found)
    return slow


def with_links(
    verdicts: Sequence[NodeVerdict], pairs: Sequence[Measured], slow: Mapping[Pair, str]
) -> list[NodeVerdict]:
    """The verdicts, with what is wrong between nodes. A node is named for a pair if another pair of it is slow as well,
    and one of the other nodes has a pair that is well."""
    tested = [each.pair for each in pairs if not each.missing]
    places = {place for each in pairs for place in each.places}

    def is_guilty(node: str) -> bool:
        beside = {other for pair in tested if pair in slow and node in pair for other in pair} - {node}
        return len(beside) > 1 and any(pair not in slow for pair in tested if beside.intersection(pair))

    guilty, found = {node for pair in slow for node in pair if is_guilty(node)}, []
    for each in verdicts:
        faults, doubts = list[tuple[str, str]](), list[str]()
        for pair, why in slow.items():
            what = f"to {pair[pair[0] == each.node]}: {why}"
            if each.node in pair and len(guilty.intersection(pair)) != 1:
                doubts.append(f"{what}; no other pair shows which of the two it is")
            elif each.node in guilty.intersection(pair):
                faults.append((min(places) if len(places) == 1 else "link", what))
        own = [link for link in pairs if each.node in link.pair]
        if own and all(link.missing for link in own) and each.truth is Truth.OK:
            doubts = doubts or ["its network was not measured"]
        if faults:
            each = replace(each, truth=Truth.BAD, faults=(*each.faults, *faults), unsure=())
        elif doubts and each.truth is not Truth.BAD:
            each = replace(each, truth=Truth.UNKNOWN, unsure=(*each.unsure, *doubts))
        linked = {place for link in own if not link.missing for place in link.places}
        found.append(replace(each, measured=(*each.measured, *sorted(linked))))
    return found
