"""Whose GPU is whose: a culprit gets the UUID of its GPU, or none."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.run_updates import KEPT_GONE_S
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Truth
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmView
from tests.builders.views import process, slurm_job


class Known:
    """A node with a job of two ranks, seen by the real state."""

    def __init__(self) -> None:
        self.state, self.sequence = ClusterState(silent_after_s=45.0, report_lifetime_s=30.0), 0
        self.state.apply_slurm(SlurmView(jobs=(slurm_job(nodes=("n1",)),), nodes=()), 1.0)

    def apply(self, at: float, *gpus: Gpu, **changes: Any) -> None:
        self.sequence += 1
        given = {"boot_id": "b", "agent_id": "a", "processes": (process(0), process(1))}
        report = Report(**{**given, "node": "n1", "sequence": self.sequence, "gpus": gpus, **changes})
        assert self.state.apply_report(report, at) == "accepted"


def gpu(uuid: str, *pids: int, **changes: Any) -> Gpu:
    return Gpu(**{"uuid": uuid, "index": 0, "pids": pids, **changes})


@pytest.fixture
def known() -> Known:
    known = Known()
    known.apply(10.0, gpu("GPU-a", 100), gpu("GPU-b", 101, 4000))
    return known


def names(known: Known, *culprits: Culprit) -> list[str | None]:
    finding = Finding(
        kind=IncidentKind.COLLECTIVE_HANG, subject="job:7", truth=Truth.BAD, summary="s", culprits=culprits
    )
    return [culprit.gpu_uuid for culprit in known.state.processes.with_gpus(finding).culprits]


def test_a_culprit_with_node_and_pid_gets_its_gpu(known: Known) -> None:
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == ["GPU-a", "GPU-b"]


def test_what_is_not_known_stays_none(known: Known) -> None:
    assert names(known, Culprit(node="n2", pid=100), Culprit(node="n1"), Culprit(pid=100), Culprit()) == [None] * 4
    assert names(known, Culprit(node="n1", pid=4000)) == [None], "it belongs to no job"


def test_a_process_on_several_gpus_names_none(known: Known) -> None:
    known.apply(20.0, gpu("GPU-a", 100), gpu("GPU-b", 100, 101))
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == [None, "GPU-b"]


def test_a_gpu_that_is_lost_and_a_rank_that_is_dead_are_still_named(known: Known) -> None:
    known.apply(20.0, gpu("GPU-a", pids=None, error="lost"), gpu("GPU-b"), processes=(process(1),))
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == ["GPU-a", "GPU-b"]
    known.apply(21.0 + KEPT_GONE_S, processes=(process(1),))
    assert names(known, Culprit(node="n1", pid=100)) == [None]


def test_a_pid_that_is_another_process_now_has_lost_its_gpu(known: Known) -> None:
    known.apply(20.0, processes=(process(0, start_ticks=9999), process(1)))
    assert names(known, Culprit(node="n1", pid=100), Culprit(node="n1", pid=101)) == [None, "GPU-b"]
