"""near_limit: a notice that names a limit, and nobody."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.job_rules import NEAR_LIMIT
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Severity, Truth
from slurm_watchdog.model.node_view import NodeView, SeenUsage
from slurm_watchdog.model.observations import Pressure, Resource, Usage
from slurm_watchdog.model.report import Report
from tests.builders.views import cluster, job

AT = 9_998.0
GIB = 1 << 30


def used(resource: Resource, count: int, limit: int, *, refused_s: float | None = None, **of: Any) -> SeenUsage:
    at = None if refused_s is None else AT - refused_s
    return SeenUsage(at=AT, usage=Usage(resource=resource, used=count, limit=limit, **of), refused_at=at)


def view(*rows: SeenUsage, pressures: tuple[Pressure, ...] = (), **changes: Any) -> ClusterView:
    well = (used(Resource.MEMORY, 1, 100),)
    nodes = (
        NodeView(name="n1", reported_at=AT, usages=(*well, *rows), pressures=pressures),
        NodeView(name="n2", reported_at=AT, usages=well),
    )
    return cluster(job(), nodes=nodes, **changes)


WRONG = view(used(Resource.MEMORY, 97 * GIB, 100 * GIB, job_id="7", step_id="0"))


def test_memory_that_is_nearly_used_up_is_a_notice_that_names_nobody() -> None:
    (finding,) = NEAR_LIMIT.detect(WRONG)
    assert (finding.truth, finding.severity, finding.culprits) == (Truth.BAD, Severity.INFO, ())
    assert finding.summary == ("Job 7 is near a limit: memory of its processes on n1: 97.0 GiB of 100.0 GiB (97%).")


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (view(used(Resource.PIDS, 10, 100, job_id="7", refused_s=30.0)), "some were refused"),
        (view(used(Resource.SHARED_MEMORY, 100, 100)), "/dev/shm of all of n1"),
        (
            view(used(Resource.FILES, 1020, 1024, job_id="7", pid=101, rank=1)),
            "open files of rank 1 on n1: 1020 of 1024",
        ),
        (
            view(pressures=(Pressure(resource="memory", some_ratio=0.5, full_ratio=0.3, job_id="7"),)),
            "waited for memory 30% of the last minute",
        ),
    ],
)
def test_other_limits_are_said_in_their_own_words(seen: ClusterView, words: str) -> None:
    (finding,) = NEAR_LIMIT.detect(seen)
    assert finding.truth is Truth.BAD and words in finding.summary


@pytest.mark.parametrize(
    ("seen", "truth"),
    [
        (view(), Truth.OK),
        (view(used(Resource.MEMORY, 97, 100, job_id="8")), Truth.OK),
        (view(used(Resource.MEMORY, 94, 100, job_id="7")), Truth.OK),
        (view(used(Resource.PIDS, 10, 100, job_id="7", refused_s=700.0)), Truth.OK),
        (view(pressures=(Pressure(resource="io", some_ratio=0.9, full_ratio=0.9),)), Truth.OK),
        (cluster(job(), nodes=()), Truth.UNKNOWN),
        (
            cluster(job(), nodes=(NodeView(name="n1", reported_at=AT), NodeView(name="n2", reported_at=AT))),
            Truth.UNKNOWN,
        ),
    ],
    ids=["well", "another job's", "not near", "refused long ago", "waits for a disk", "no node", "nothing said"],
)
def test_nothing_is_said_of_what_is_not_near_or_not_known(seen: ClusterView, truth: Truth) -> None:
    (finding,) = NEAR_LIMIT.detect(seen)
    assert finding.truth is truth


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
