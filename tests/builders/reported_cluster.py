"""A cluster whose nodes report, with a clock that steps."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.observations import Event, EventKind, Process
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.summed import Memory, summed
from tests.builders.views import slurm_job


class Cluster:
    """A state, and a clock that the test moves."""

    def __init__(self) -> None:
        self.state = ClusterState(silent_after_s=15, report_lifetime_s=60)
        self.now = 1000.0
        self.sequence = 0
        self.memory = Memory()
        self.slurm()

    def slurm(self, **changes: Any) -> None:
        node = SlurmNode(name="n1", address="n1", state="IDLE")
        self.state.apply_slurm(SlurmView(jobs=(slurm_job(**changes),), nodes=(node,)), self.now)

    def report(self, *processes: Process, node: str = "n1", wait: float = 5.0, **changes: Any) -> str:
        self.now += wait
        self.sequence += 1
        given = {"boot_id": "b" + node, "agent_id": "a", "sequence": self.sequence}
        report = Report(node=node, processes=processes, **{**given, **changes})
        return self.state.apply_report(summed(report, self.now, self.memory), self.now)

    def step(self, number: int, wait: float = 5.0, **changes: Any) -> None:
        self.report(wait=wait, events=(progress_event(number, **changes),))

    @property
    def job(self) -> JobView:
        view = self.state.job_view("7", self.now)
        assert view is not None
        return view


def progress_event(step: int, **changes: Any) -> Event:
    given = {
        "kind": EventKind.PROGRESS,
        "job_id": "7",
        "age_s": 0.0,
        "source": "log",
        "pattern": "p",
        "step": step,
    }
    return Event(**{**given, **changes})
