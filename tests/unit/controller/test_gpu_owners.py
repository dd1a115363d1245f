"""Whose GPU is whose: a culprit gets the UUID of its GPU, or none."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.gpu_owners import KEPT_S, GpuPids
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Truth
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.report import Report
from tests.builders.views import process


def report(*gpus: Gpu, node: str = "n1", **changes: Any) -> Report:
    given = {"boot_id": "b", "agent_id": "a", "sequence": 1, "processes": (process(0), process(1))}
    return Report(**{**given, "node": node, "gpus": gpus, **changes})


def gpu(uuid: str, *pids: int, **changes: Any) -> Gpu:
    return Gpu(**{"uuid": uuid, "index": 0, "pids": pids, **changes})


@pytest.fixture
def known() -> GpuPids:
    known = GpuPids(LeftOut())
    known.apply(report(gpu("GPU-a", 100), gpu("GPU-b", 101, 4000)), 10.0)
    return known


def names(known: GpuPids, *culprits: Culprit) -> list[str | None]:
    finding = Finding(
        kind=IncidentKind.COLLECTIVE_HANG, subject="job:7", truth=Truth.BAD, summary="s", culprits=culprits
    )
    return [culprit.gpu_uuid for culprit in known.with_gpus(finding).culprits]


def test_a_culprit_with_node_and_pid_gets_its_gpu(known: GpuPids) -> None:
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == ["GPU-a", "GPU-b"]


def test_what_is_not_known_stays_none(known: GpuPids) -> None:
    assert names(known, Culprit(node="n2", pid=100), Culprit(node="n1"), Culprit(pid=100), Culprit()) == [None] * 4
    assert names(known, Culprit(node="n1", pid=4000)) == [None], "it belongs to no job"


def test_a_process_on_several_gpus_names_none(known: GpuPids) -> None:
    known.apply(report(gpu("GPU-a", 100), gpu("GPU-b", 100, 101)), 20.0)
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == [None, "GPU-b"]


def test_a_gpu_that_is_lost_and_a_rank_that_is_dead_are_still_named(known: GpuPids) -> None:
    known.apply(report(gpu("GPU-a", pids=None, error="lost"), gpu("GPU-b"), processes=(process(1),)), 20.0)
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == ["GPU-a", "GPU-b"]
    known.apply(report(), 11.0 + KEPT_S)
    assert names(known, Culprit(node="n1", pid=100)) == [None]


def test_a_pid_that_is_another_process_now_has_lost_its_gpu(known: GpuPids) -> None:
    known.apply(report(processes=(process(0, start_ticks=99), process(1))), 20.0)
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == [None, "GPU-b"]


def test_the_state_learns_it_from_reports() -> None:
    state = ClusterState(silent_after_s=45.0, report_lifetime_s=30.0)
    state.apply_report(report(gpu("GPU-a", 100)), 10.0)
    assert names(state.gpus, Culprit(node="n1", pid=100)) == ["GPU-a"]
