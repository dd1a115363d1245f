"""Nodes and pairs as `test-nodes` measured them."""

from __future__ import annotations

from typing import Any

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
