"""A node of a job that waits, or whose links are congested, unlike all others is a fact, and never names a node."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.analysis.links import WAITED_LEAST, WAITED_TIMES, facts_of, stand_out
from slurm_watchdog.detect import slow_job
from slurm_watchdog.detect.slow_job import SlowJob, slow_node
from slurm_watchdog.diagnose.recorded_collectives import links_said
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_view import LinkView, NodeView
from slurm_watchdog.model.observations import Link, Pressure
from tests.builders import slow_nodes as slow


def waits(*ratios: float, resource: str = "io", job_id: str | None = None) -> list[NodeView]:
    return [
        NodeView(
            name=f"n{number + 1}", reported_at=0.0,
            pressures=(Pressure(resource=resource, some_ratio=ratio, full_ratio=0.0, job_id=job_id),),
        )
        for number, ratio in enumerate(ratios)
    ]  # fmt: skip


def congested(*values: float, field: str = "slowed_s") -> list[NodeView]:
    return [
        NodeView(
            name=f"n{number + 1}", reported_at=0.0,
            links=(LinkView(link=Link(**{"name": "mlx5_0/1", "kind": "roce", "up": True, field: value})),),  # type: ignore[arg-type]
        )
        for number, value in enumerate(values)
    ]  # fmt: skip


def test_one_node_that_waits_for_storage_is_said_with_what_is_usual() -> None:
    assert facts_of(waits(0.02, 0.4, 0.01, 0.02), "7") == (
        "pressure: processes on n2 waited for storage 40% of the last minute; the median of 4 nodes is 2%",
    )
    (of_job,) = facts_of(waits(0.0, 0.4, 0.0, 0.0, resource="cpu", job_id="7"), "7")
    assert of_job.startswith("pressure: processes of the job on n2 waited for the processor 40%")
    assert facts_of(waits(0.0, 0.4, 0.0, 0.0, job_id="8"), "7") == (), "another job's processes"


@pytest.mark.parametrize(
    "nodes",
    [
        waits(0.3, 0.3, 0.3, 0.3),
        waits(0.4, 0.0, 0.0),
        waits(0.05, 0.0, 0.0, 0.0),
        waits(0.4, 0.4, 0.0, 0.0, 0.0),
        waits(0.1, 0.2, 0.3, 0.9),
        congested(5000.0, 4000.0, 3000.0, 9000.0),
        congested(50.0, 0.0, 0.0, 0.0),
        [],
    ],
    ids=["all wait", "few peers", "little", "two of five", "scatter", "all congested", "a few packets", "no node"],
)
def test_what_nodes_have_in_common_or_is_little_is_not_said(nodes: list[NodeView]) -> None:
    assert facts_of(nodes, "7") == ()


@pytest.mark.parametrize("field", ["waits_s", "marked_s", "slowed_s", "resent_s"])
def test_congestion_of_one_nodes_link_is_a_fact_of_a_hang_and_of_a_slow_job(field: str) -> None:
    nodes = congested(0.0, 2e6, 10.0, 0.0, field=field)
    (said,) = facts_of(nodes, "7")
    assert said.startswith("network: mlx5_0/1 of n2 ") and "2,000,000 a second" in said
    assert links_said(nodes) == (said,)


@given(st.dictionaries(st.text(max_size=3), st.floats(0.0, 1.0), max_size=40))
def test_no_more_than_a_quarter_stands_out_and_nobody_of_few(values: dict[str, float]) -> None:
    found = stand_out(values, WAITED_LEAST, WAITED_TIMES)
    assert len(found) <= max(1, len(values) / 4) and (len(values) > 3 or not found)


def slow_with(nodes: list[NodeView], **changes: Any) -> ClusterView:
    base = slow.view(**changes)
    seen = {node.name: node for node in nodes}
    return replace(base, nodes=tuple(replace(node, pressures=seen[node.name].pressures) for node in base.nodes))


def test_pressure_of_one_node_names_no_node_of_a_slow_job_and_is_a_fact_of_it() -> None:
    view = slow_with(waits(0.02, 0.4, 0.01, 0.02))
    (found,) = slow_node(view, SlowJob())
    assert found.truth is Truth.UNKNOWN and not found.culprits
    (job,) = slow_job.detect(view, SlowJob())
    assert job.truth is Truth.BAD and not job.culprits and not job.exclude_nodes
    assert any("on n2 waited for storage 40%" in fact for fact in job.facts)


def test_pressure_is_a_fact_beside_a_sign() -> None:
    view = slow_with(waits(0.02, 0.4, 0.01, 0.02), odd={"n2": {"throttle": ("hw_slowdown",)}})
    (found,) = slow_node(view, SlowJob())
    assert found.exclude_nodes == ("n2",)
    assert any("on n2 waited for storage 40%" in fact for fact in found.facts)
