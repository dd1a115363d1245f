"""Throttle reasons over time: a card that comes and goes with its heat is known by its share, and forgotten after it."""

from __future__ import annotations

import pytest

from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.controller.state.nodes import Nodes
from slurm_watchdog.model.observations import Gpu, Resource, Usage
from slurm_watchdog.model.report import Report


def test_share_of_a_reason_under_load_rises_falls_and_is_forgotten() -> None:
    sums, at = NodeSums(), 0.0

    def looks(
        count: int, *reasons: tuple[str, ...] | None, busy: float = 1.0, pids: tuple[int, ...] = (1, 2)
    ) -> dict[str, float]:
        nonlocal at
        for number in range(count):
            at += 5.0
            gpu = Gpu(uuid="GPU-0", index=0, utilization_ratio=busy, throttle=reasons[number % len(reasons)], pids=pids)
            (row,) = sums.add(Report(node="n1", boot_id="b", agent_id="a", sequence=1, gpus=(gpu,)), at).gpus
        return dict(row.throttled)

    assert looks(60, ()) == {}
    assert looks(120, ("hw_thermal_slowdown",), ())["hw_thermal_slowdown"] > 0.4
    assert looks(60, None) == looks(60, ("hw_thermal_slowdown",), busy=0.2, pids=(2, 1)) != {}
    assert looks(240, ()) == {}
    assert looks(60, ("hw_thermal_slowdown",)) != {} and looks(1, ("hw_thermal_slowdown",), busy=0.0) == {}
    assert looks(60, ("hw_thermal_slowdown",)) != {} and looks(1, (), pids=(1, 3)) == {}


@pytest.mark.parametrize(
    ("counts", "rose"), [((None, 5), False), ((0, 1), True), ((2, None, 5), False), ((3, 3), False), ((3, 1), False)]
)
def test_count_of_kills_rises_between_two_known_numbers_alone(counts: tuple[int | None, ...], rose: bool) -> None:
    nodes = Nodes()
    for at, refused in enumerate(counts):
        usage = Usage(resource=Resource.MEMORY, used=1, job_id="7", refused=refused)
        nodes.apply(Report(node="n1", boot_id="b", agent_id="a", sequence=1, usages=(usage,)), float(at))
    (view,) = nodes.views()
    assert (view.usages[0].refused_at is not None) is rose
