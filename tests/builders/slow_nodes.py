"""A slow job on nodes whose GPUs differ."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.cluster_view import ClusterView, JobView, RankGpu, StepTime
from slurm_watchdog.model.node_view import NodeView, SeenEvent
from tests.builders.gpu_faults import NOW, card
from tests.builders.views import cluster, slurm_job

NAMES = ("n1", "n2", "n3", "n4")


SLOWER = [10.0] * 60 + [10.7] * 30


def times(series: list[float]) -> tuple[StepTime, ...]:
    return tuple(
        StepTime(step=n, seconds=s, at=NOW - 10.0 * (len(series) - n), logged=True) for n, s in enumerate(series)
    )


def cards(odd: dict[str, dict[str, Any]] | None = None) -> tuple[RankGpu, ...]:
    """Two cards a node; `odd` changes the first one of the nodes that it names."""
    odd = odd or {}
    usual = {"recent_power_w": 600.0, "usual_power_w": 610.0, "temperature_c": 60.0}
    return tuple(
        RankGpu(
            rank=2 * place + index, pid=100 + index,
            view=card(index, node=name, **{**usual, **(odd.get(name, {}) if index == 0 else {})}),
        )
        for place, name in enumerate(NAMES)
        for index in range(2)
    )  # fmt: skip


def view(
    odd: dict[str, dict[str, Any]] | None = None, *, series: list[float] | None = None,
    events: dict[str, tuple[SeenEvent, ...]] | None = None, nodes: tuple[str, ...] = NAMES, **changes: Any
) -> ClusterView:  # fmt: skip
    given: dict[str, Any] = {
        "job": slurm_job(nodes=NAMES), "gpus": cards(odd), "step_times": times(SLOWER if series is None else series),
    }  # fmt: skip
    seen = {} if events is None else events
    return cluster(
        JobView(**{"run_age_s": 5000.0, **given, **changes}),
        nodes=tuple(NodeView(name=n, reported_at=NOW - 2, events=seen.get(n, ())) for n in nodes),
    )
