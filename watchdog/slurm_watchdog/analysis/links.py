"""What is wrong with a network link, by its own past and by the same link of other nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from slurm_watchdog.model.node_view import LinkView, NodeView

DOWN_S = 60.0  # A link that comes back within a minute has flapped: that is another complaint.
FLAPS = 2  # Once within an hour is a cable that was moved.
RISES = 10
"""Looks, a minute apart, in which the errors of a link rose without a break; a few symbols an hour are within what
a cable may have."""
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


Rates = Mapping[tuple[str, str], Mapping[str, int]]
"""(name, kind) of a link -> node -> the rate at which it runs there."""
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
