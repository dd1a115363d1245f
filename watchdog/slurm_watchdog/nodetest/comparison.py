"""What a test measured on each node beside its peers, for the picture of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from slurm_watchdog.knowledge.node_figures import KINDS, Kind, split_key
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_comparison import (
    MOST_FIGURES,
    MOST_NODES,
    ComparedFigure,
    ComparedNode,
    NodeComparison,
)
from slurm_watchdog.nodetest.conduct import Report
from slurm_watchdog.nodetest.judge import Verdict
from slurm_watchdog.nodetest.results import Measured

VERDICTS = {Truth.BAD: "bad", Truth.OK: "ok", Truth.UNKNOWN: "unknown"}
ORDER = (Truth.BAD, Truth.UNKNOWN, Truth.OK)
MOST_SHARE = 100.0
MOST_WHY, MOST_SENTENCE = 300, 400


def comparison_of(report: Report, sentence: str) -> NodeComparison:
    """The worst nodes first. Of several figures of one kind (disks, GPUs) a node's worst one, as in the table."""
    by_name = {each.name: each for each in report.nodes}
    verdicts = sorted(report.verdicts, key=lambda each: ORDER.index(each.truth))
    shown = verdicts[:MOST_NODES]
    names = [name for name in KINDS if any(figures_of(report, each.node, name) for each in verdicts)]
    return NodeComparison(
        began_at=report.began_at,
        ended_at=report.ended_at,
        sentence=sentence[:MOST_SENTENCE],
        nodes=tuple(_node(each) for each in shown),
        figures=tuple(_figure(report, verdicts, by_name, name) for name in names[:MOST_FIGURES]),
        left_out=len(verdicts) - len(shown),
    )


def figures_of(report: Report, node: str, name: str) -> list[float]:
    """All of a node for one kind of figure; of links those to its neighbours, of their directions the slower one."""
    if name.startswith("pair_"):
        of = [each for each in report.pairs if node in each.name.split(" ")]
        if name == "pair_out":
            return [
                min(each.figures[name], each.figures.get("pair_in", each.figures[name]))
                for each in of
                if name in each.figures
            ]
    else:
        of = [each for each in report.nodes if each.name == node]
    return [value for each in of for key, value in each.figures.items() if split_key(key)[0] == name]


def worst(name: str, values: Sequence[float]) -> float:
    """Of several of one kind; of links the best, for the others may be slow at their other end."""
    best = name.startswith("pair_")
    return max(values) if KINDS[name].more_is_better is best else min(values)


def _node(verdict: Verdict) -> ComparedNode:
    why = "; ".join(verdict.reasons)
    return ComparedNode(
        name=verdict.node,
        verdict=VERDICTS[verdict.truth],  # type: ignore[arg-type]
        why=why if len(why) <= MOST_WHY else f"{why[: MOST_WHY - 1]}…",
    )


def _figure(report: Report, verdicts: Sequence[Verdict], by_name: Mapping[str, Measured], name: str) -> ComparedFigure:
    """A node's peers are those of its model, and of a link all others."""
    kind = KINDS[name]
    of_node = {each.node: worst(name, own) for each in verdicts if (own := figures_of(report, each.node, name))}

    def model(node: str) -> str:
        return "" if name.startswith("pair_") or node not in by_name else by_name[node].model

    values: list[tuple[float, float] | None] = []
    for each in verdicts[:MOST_NODES]:
        value = of_node.get(each.node)
        peers = [theirs for other, theirs in of_node.items() if other != each.node and model(other) == model(each.node)]
        share = None if value is None or not peers else _share(value, statistics.median(peers), kind)
        values.append(None if value is None or share is None else (value, share))
    least = 1 - kind.relative if kind.more_is_better else 1 / (1 + kind.relative)
    return ComparedFigure(title=_title(name, kind), unit=kind.unit, worst_share=round(least, 3), values=tuple(values))


def _title(name: str, kind: Kind) -> str:
    """Without the directory, or the number of the GPU: of several the worst one is shown."""
    return f"{kind.title} a {name.partition('_')[0]}" if kind.title.endswith(" of") else kind.title


def _share(value: float, middle: float, kind: Kind) -> float | None:
    """How good it is beside what the peers have: below 1 it is worse. None: nothing can be said."""
    if value < 0 or middle < 0 or (value == 0 and middle == 0):
        return None
    above, below = (value, middle) if kind.more_is_better else (middle, value)
    return MOST_SHARE if below == 0 else round(min(MOST_SHARE, above / below), 4)
