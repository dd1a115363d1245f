"""Nodes and pairs as `test-nodes` measured them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from slurm_watchdog.model.node_comparison import KeptComparison
from slurm_watchdog.nodetest.comparison import comparison_of
from slurm_watchdog.nodetest.conduct import Report, with_links
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.pairs import judge_pairs, ring
from slurm_watchdog.nodetest.results import Measured, Problem

WELL = {"cpu_core": 2000.0, "cpu_all": 60000.0, "memory_all": 300.0, "disk_write /tmp": 900.0, "mount_write /s": 1500.0}
LINK = {"pair_latency": 20.0, "pair_out": 90.0, "pair_in": 91.0}


def node(name: str, problems: tuple[Problem, ...] = (), **more: Any) -> Measured:
    """A healthy node but for what is given: figures with `figures`, others as fields of Measured."""
    figures = WELL | more.pop("figures", {})
    return Measured(name=name, problems=problems, **{"model": "X x32", "figures": figures, **more})


def nodes(count: int, *odd: Measured) -> list[Measured]:
    """n1 … ncount, with `odd` in the place of those of their name."""
    given = {each.name: each for each in odd}
    return [given.get(f"n{number}", node(f"n{number}")) for number in range(1, count + 1)]


def problem(phase: str, state: str = "late", subject: str = "", said: str = "no end within 30 s") -> Problem:
    return Problem(phase=phase, subject=subject, state=state, said=said)


def link(pair: tuple[str, str], **figures: float) -> Measured:
    """A healthy pair but for `figures`."""
    return Measured(name=" ".join(pair), figures=LINK | figures)


def compared(count: int, said: str = "") -> KeptComparison:
    """The picture of a test of so many nodes: n3 has half of its CPU, and the last one was not judged. `said`: what
    stands in the place of every word that is not the program's."""
    measured = []
    for at in range(1, count + 1):
        share = 1.0 + 0.01 * ((7 * at) % 5 - 2)
        odd = {"cpu_all": 31000.0, "memory_all": 140.0} if at == 3 else {}
        figures = {key: value * share for key, value in WELL.items()} | odd
        busy = ("cpu_core",) if at == count else ()
        measured.append(Measured(name=f"n{at}", model="X x32", figures=figures, disturbed=busy))
    pairs = ring([each.name for each in measured])
    links = [link(pair, pair_latency=20.0 + at % 3, pair_out=90.0 - at % 4) for at, pair in enumerate(pairs)]
    verdicts = with_links(judge_nodes(measured, {}, {}), judge_pairs(links, {}), links, pairs)
    report = Report(
        began_at=1_790_000_000.0, ended_at=1_790_000_095.0, verdicts=tuple(verdicts), nodes=tuple(measured),
        pairs=tuple(links),
    )  # fmt: skip
    found = comparison_of(report, said[:400] or f"n3 is bad, of {count} nodes tested in 95 s.")
    if said:
        nodes = tuple(replace(each, name=said[:160], why=said[:400]) for each in found.nodes)
        found = replace(found, nodes=nodes, figures=tuple(replace(each, title=said[:160]) for each in found.figures))
    return KeptComparison(comparison=found, by=said or "ops")
