"""Throttle reasons over time: a card that comes and goes with its heat is known by its share, and forgotten after it."""

from __future__ import annotations

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.state.nodes import Nodes
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.report import Report


def test_share_of_a_reason_under_load_rises_falls_and_is_forgotten() -> None:
    nodes, at = Nodes(LeftOut()), 0.0

    def looks(count: int, *reasons: tuple[str, ...] | None, busy: float = 1.0) -> dict[str, float]:
        nonlocal at
        for number in range(count):
            at += 5.0
            gpu = Gpu(uuid="GPU-0", index=0, utilization_ratio=busy, throttle=reasons[number % len(reasons)])
            nodes.apply(Report(node="n1", boot_id="b", agent_id="a", sequence=1, gpus=(gpu,)), at)
        (view,) = nodes.views()
        return dict(view.gpus[0].throttled)

    assert looks(60, ()) == {}
    assert looks(120, ("hw_thermal_slowdown",), ())["hw_thermal_slowdown"] > 0.4
    assert looks(60, None) == looks(60, ("hw_thermal_slowdown",), busy=0.0)
    assert looks(240, ()) == {}
