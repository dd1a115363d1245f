"""near_limit: of what is counted, what is new; tests/cases/near_limit.yaml has the rest."""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import Resource, Usage
from slurm_watchdog.model.report import Report


def test_count_of_refusals_that_rises_is_dated_and_a_group_that_is_gone_is_remembered() -> None:
    state = ClusterState(silent_after_s=60.0, report_lifetime_s=60.0)

    def report(sequence: int, at: float, *rows: Usage) -> NodeView:
        state.apply_report(Report(node="n1", boot_id="b", agent_id="a", sequence=sequence, usages=rows), at)
        (node,) = state.nodes.views()
        return node

    row = Usage(resource=Resource.MEMORY, used=1, limit=5, refused=0, job_id="7")
    assert report(1, 10.0, row).usages[0].refused_at is None
    (rose,) = report(2, 20.0, replace(row, refused=1)).usages
    assert rose.refused_at == 20.0
    assert [(seen.at, seen.usage.limit) for seen in report(3, 30.0).usages] == [(20.0, 5)]
    assert report(4, 700.0).usages == ()
