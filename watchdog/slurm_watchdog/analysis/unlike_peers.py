"""What one node of a job measures and its other nodes do not: time in which processes waited for the processor, memory
or storage (the kernel's pressure), congestion and lost packets of its links. Pure.

Facts for people, never evidence by themselves: which node is the cause and which one suffers, none of them says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slurm_watchdog.analysis.links import PEERS
from slurm_watchdog.analysis.step_statistics import MAD_TO_SIGMA
from slurm_watchdog.base.averages import median
from slurm_watchdog.model.node_view import NodeView

SIGMAS = 6.0  # Robust standard deviations between nodes: with fewer, one node of thousands is so by chance.
MOST_SHARE = 0.25  # More nodes of a job than this share are no exception.
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
    return found if len(found) <= max(1, MOST_SHARE * len(values)) else []


def facts_of(nodes: Sequence[NodeView], process_job: str) -> tuple[str, ...]:
    """Sentences about the nodes of one job: pressure, then links; `process_job` is Slurm's id of its processes."""
    return (*_pressures(nodes, process_job), *congestion(nodes))[:MAX_SAID]


def _pressures(nodes: Sequence[NodeView], process_job: str) -> Iterator[str]:
    for resource, words in WORDS.items():
        of_job, of_node = ({n.name: s for n in nodes if (s := _waited(n, resource, j)) is not None}
                           for j in (process_job, None))  # fmt: skip
        whole = len(of_job) == len(nodes)
        who = "processes of the job" if whole else "processes"
        for each in stand_out(of_job if whole else of_node, WAITED_LEAST, WAITED_TIMES):
            yield (
                f"pressure: {who} on {each.node} waited for {words} {each.value:.0%} of the last minute; the median of "
                f"{each.nodes} nodes is {each.usual:.0%}"
            )


def _waited(node: NodeView, resource: str, job_id: str | None) -> float | None:
    found = (each.some_ratio for each in node.pressures if (each.resource, each.job_id) == (resource, job_id))
    return next(found, None)


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
