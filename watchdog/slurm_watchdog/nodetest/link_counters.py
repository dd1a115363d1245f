"""Errors that network interfaces counted while links were measured: whose rose, and on no other node. Pure.

A node is measured with two neighbours, in two jobs: it is accused only if the errors rose in each of them. Drops and
discards are not judged: they follow from congestion, from the measurement's own full queue, and from protocols that
nobody listens to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from slurm_watchdog.knowledge.node_figures import LEAST_PEERS, LINK_ERRORS
from slurm_watchdog.nodetest.results import Fault, Finding, Measured

MOST_OTHERS: Final = 0.25
"""Share of the other nodes that may have as many errors: with more it is the fabric's, or the driver counts something
else under that name (a judgement)."""
TIMES: Final = 10
"""As many as on an ordinary other node, at least."""
LEAST_JOBS: Final = 2

Rises = Mapping[str, Mapping[str, int]]
"""The other node of a pair to what rose meanwhile: `eth0 rx_errors` or `mlx5_0/1 symbol_error` to by how much."""


def rises_of(links: Sequence[Measured]) -> dict[str, dict[str, Mapping[str, int]]]:
    """Node to its `Rises`; a node whose counters are not known is not there."""
    found: dict[str, dict[str, Mapping[str, int]]] = {}
    for link in links:
        names = link.name.split(" ")
        for node in names:
            risen = link.facts.get("pair", {}).get(f"counters {node}")
            if isinstance(risen, dict):
                other = next((each for each in names if each != node), "")
                whole = {name: value for name, value in risen.items() if isinstance(value, int)}
                found.setdefault(node, {})[other] = whole
    return found


def judge_counters(links: Sequence[Measured]) -> dict[str, list[Finding]]:
    """Node to its errors that other nodes do not have: certain where they rose in each of at least two jobs."""
    rises = rises_of(links)
    found: dict[str, list[Finding]] = {}
    for node, of_node in rises.items():
        others = [each for name, each in rises.items() if name != node]
        if len(others) < LEAST_PEERS:
            continue
        for counter in sorted({name for risen in of_node.values() for name in risen}):
            if risen := _judge(counter, of_node, others):
                found.setdefault(node, []).append(risen)
    return found


def _judge(counter: str, of_node: Rises, others: Sequence[Rises]) -> Finding | None:
    port, _, name = counter.rpartition(" ")
    kind = LINK_ERRORS.get(name)
    if kind is None:
        return None
    elsewhere = sorted(_most(name, each) for each in others)
    least = max(kind.least, TIMES * elsewhere[len(elsewhere) // 2])
    bad = {other: risen[counter] for other, risen in of_node.items() if risen.get(counter, 0) >= least}
    if not bad or sum(each >= kind.least for each in elsewhere) > MOST_OTHERS * len(elsewhere):
        return None
    where = ", ".join(f"{number:,} while it was measured with {other}" for other, number in sorted(bad.items()))
    clean = [other for other in of_node if other not in bad]
    with_none = f", fewer with {', '.join(clean)}" if clean else ""
    what = f"{port}: {kind.title}: {where}{with_none}; at most {elsewhere[len(elsewhere) // 2]:,} on most other nodes"
    return Finding(fault=Fault(place=f"link:{port}", what=what), is_certain=not clean and len(bad) >= LEAST_JOBS)


def _most(name: str, rises: Rises) -> int:
    """Of a kind of counter, over the ports and jobs of a node."""
    return max(
        (number for risen in rises.values() for counter, number in risen.items() if counter.rpartition(" ")[2] == name),
        default=0,
    )
