"""What is wrong with a network link, by its own past and by the same link of other nodes; and what one node of a job
measures that its others do not: time in which processes waited for the processor, memory or storage (the kernel's
pressure), congestion and lost packets. These are facts for people, never evidence by themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from slurm_watchdog.analysis.level_shift import MAD_TO_SIGMA
from slurm_watchdog.base.averages import median
from slurm_watchdog.knowledge.limits import most_odd
from slurm_watchdog.model.node_view import LinkView, NodeView

DOWN_S = 60.0  # A link that comes back within a minute has flapped: that is another complaint.
FLAPS = 2  # Once within an hour is a cable that was moved.
RISES = 10  # Looks, a minute apart, in a row in which its errors rose; a few symbols an hour are usual for a cable.
LOOK_S = 60.0
MISSED = 2  # Looks of RISES in which they may stay where they were.
PEERS = 3  # Links of the same name and kind on other nodes that show at which rate such a link runs.
STOPPED = 0.01
MOVES_BYTES_S = 1e6  # Who usually moved less has nothing to stop.


class Complaint(NamedTuple):
    """One thing that is wrong with a link."""

    signal: str  # `down`, `flaps`, `slow` or `errors`.
    text: str  # The rest of a sentence that begins with the link.
    since: float


Rates = Mapping[tuple[str, str], Mapping[str, int]]  # (name, kind) of a link -> node -> its rate there.
Rising = Set[tuple[str, str]]  # (node, kind) of links.


def rates_of(nodes: Iterable[NodeView]) -> Rates:
    """At which rates the links of these nodes run that are up."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for node in nodes:
        for name, kind, rate_bits_s in node.rates:
            found.setdefault((name, kind), {})[node.name] = rate_bits_s
    return found


def rising_of(nodes: Iterable[NodeView]) -> Rising:
    """Where errors rise, if only for half as long as a complaint takes."""
    return frozenset(
        (node.name, each.link.kind)
        for node in nodes
        for each in node.links
        if each.rising is not None and each.rising.times >= RISES // 2
    )


def rises(link: LinkView) -> bool:
    """Whether its errors rise in almost every look."""
    rise = link.rising
    if rise is None or rise.times < RISES:
        return False
    return rise.last_at - rise.first_at <= rise.times * LOOK_S * (RISES + MISSED) / RISES


def has_complaint(link: LinkView) -> bool:
    """Whether something may be wrong with it by its own past."""
    rate, best = link.link.rate_bits_s, link.best_rate_bits_s
    return link.carried and (
        link.down_since is not None
        or len(link.went_down) >= FLAPS
        or (rate is not None and best is not None and rate < best)
        or rises(link)
    )


def complaints(
    node: NodeView, link: LinkView, now: float, rates: Rates, rising: Rising = frozenset()
) -> list[Complaint]:
    """All that is wrong with one link of a node, the worst first; a link that was never up is a port without a cable.
    `rates` are those of the nodes of one job, and `rising` says on which of them errors rise: on several it is no
    cable. One through which nothing ever went is not judged."""
    found: list[Complaint] = []
    if not link.carried:
        return found
    if link.down_since is not None and now - link.down_since >= DOWN_S:
        found.append(Complaint("down", f"has been down for {now - link.down_since:.0f} s", link.down_since))
    if len(link.went_down) >= FLAPS:
        times = ", ".join(f"{now - at:.0f} s" for at in link.went_down[-4:])
        text = f"went down {len(link.went_down)} times within an hour ({times} ago)"
        found.append(Complaint("flaps", text, link.went_down[0]))
    rate = link.link.rate_bits_s if link.link.up else None
    if rate is not None and link.best_rate_bits_s is not None and rate < link.best_rate_bits_s:
        text = f"runs at {_gbit(rate)}, and has run at {_gbit(link.best_rate_bits_s)}"
        found.append(Complaint("slow", text, now))
    elif rate is not None:
        others = [each for name, each in rates.get((link.link.name, link.link.kind), {}).items() if name != node.name]
        if len(others) >= PEERS and rate < min(others):
            text = f"runs at {_gbit(rate)}, that of {len(others)} other nodes at {_gbit(min(others))} and more"
            found.append(Complaint("slow", text, now))
    shared = any(kind == link.link.kind and name != node.name for name, kind in rising)
    if link.rising is not None and rises(link) and not shared:
        text = f"has errors that rise for {now - link.rising.first_at:.0f} s ({link.rising.times} times)"
        found.append(Complaint("errors", text, link.rising.first_at))
    return found


def _gbit(rate_bits_s: int) -> str:
    return f"{rate_bits_s / 1e9:g} Gb/s"


def stopped(nodes: Iterable[NodeView]) -> tuple[str, ...]:
    """Of the nodes of a job, those through whose links nothing goes any more, while something still goes through all
    links of more other nodes: `mlx5_0/1 of n2`, `all 8 links of n3`. No one where all have stopped, which is what a
    hang looks like. A node counts once, however many links it has."""
    still: dict[str, list[str]] = {}
    moving = 0
    for node in nodes:
        known = [(each, moved) for each in node.links if (moved := each.link.moved_bytes_s) is not None]
        usual = [(each, moved) for each, moved in known if (each.usual_bytes_s or 0.0) >= MOVES_BYTES_S]
        silent = [each.link.name for each, moved in usual if moved <= STOPPED * (each.usual_bytes_s or 0.0)]
        moving += bool(usual) and not silent
        if silent:
            whole = len(silent) > 1 and len(silent) == len(usual)
            still[node.name] = [f"all {len(silent)} links"] if whole else silent
    if not still or moving <= len(still):
        return ()
    return tuple(f"{name} of {node}" for node, names in still.items() for name in names)


# -------------------------------------------------------------------------------- unlike its peers

SIGMAS = 6.0  # Robust standard deviations between nodes: with fewer, one node of thousands is so by chance.
MAX_SAID = 4

WAITED_LEAST = 0.1  # Share of a minute below which waiting slows nothing that a person would look for.
WAITED_TIMES = 3.0
WORDS = {"cpu": "the processor", "memory": "memory", "io": "storage"}


class Counted(NamedTuple):
    """One rate of a link that is compared."""

    field: str  # Of slurm_watchdog.model.observations.Link.
    least: float  # A second: below it no one notices (a judgement).
    words: str  # Between the link and the number.


TIMES = 10.0  # So many times the median a rate has to be: congestion moves through a fabric all the time.
RATES = (
    Counted("waits_s", 1e5, "waits for credits to send (ticks)"),
    Counted("marked_s", 100.0, "receives packets with a mark of congestion"),
    Counted("slowed_s", 100.0, "is notified of congestion, and slows down"),
    Counted("resent_s", 10.0, "loses packets, or gets them out of order"),
)


class Unlike(NamedTuple):
    """One node whose value stands out."""

    node: str
    value: float
    usual: float  # Median of all.
    nodes: int  # That were compared.


def stand_out(values: Mapping[str, float], least: float, times: float) -> list[Unlike]:
    """Of values by node, those that are far above the usual one: at least `least`, and `times` the median of all.
    Nothing with fewer than PEERS others, or where many are so."""
    if len(values) <= PEERS:
        return []
    usual = median(values.values())
    sigma = MAD_TO_SIGMA * median(abs(each - usual) for each in values.values())
    limit = max(least, times * usual, usual + SIGMAS * sigma)
    found = [Unlike(node, value, usual, len(values)) for node, value in values.items() if value >= limit]
    return found if len(found) <= most_odd(len(values)) else []


def facts_of(nodes: Sequence[NodeView], process_job: str) -> tuple[str, ...]:
    """Sentences about the nodes of one job: pressure, then links; `process_job` is Slurm's id of its processes."""
    return (*_pressures(nodes, process_job), *congestion(nodes))[:MAX_SAID]


def _pressures(nodes: Sequence[NodeView], process_job: str) -> Iterator[str]:
    for resource, words in WORDS.items():
        rows = [(node.name, each) for node in nodes for each in node.pressures if each.resource == resource]
        of_job, of_node = ({name: e.some_ratio for name, e in rows if e.job_id == its} for its in (process_job, None))
        whole = len(of_job) == len(nodes)
        who = "processes of the job" if whole else "processes"
        for each in stand_out(of_job if whole else of_node, WAITED_LEAST, WAITED_TIMES):
            yield (
                f"pressure: {who} on {each.node} waited for {words} {each.value:.0%} of the last minute; the median of "
                f"{each.nodes} nodes is {each.usual:.0%}"
            )


def congestion(nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """Sentences about links of these nodes that are unlike the link of the same name on the others."""
    values: dict[tuple[Counted, str, str], dict[str, float]] = {}
    for node in nodes:
        for each in node.links:
            for rate in RATES:
                value = getattr(each.link, rate.field)
                if value is not None:
                    values.setdefault((rate, each.link.kind, each.link.name), {})[node.name] = value
    return tuple(
        f"network: {name} of {each.node} {rate.words}: {each.value:,.0f} a second; the median of {each.nodes} nodes "
        f"is {each.usual:,.0f}"
        for (rate, _, name), of_nodes in values.items()
        for each in stand_out(of_nodes, rate.least, TIMES)
    )[:MAX_SAID]
