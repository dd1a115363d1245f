"""What the controller keeps of jobs and nodes that came and went does not grow with their number."""

from __future__ import annotations

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.controller.state.agents import MAX_STRANGERS
from slurm_watchdog.controller.state.cluster import KEPT_NODE_S, ClusterState
from slurm_watchdog.model.observations import (
    Event,
    EventKind,
    FaultSeverity,
    Gpu,
    GpuHolder,
    LogFile,
    MountProbe,
    NodeEvent,
)
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.memory_held import held
from tests.builders.views import blocked, process, slurm_job

LISTED = 5
"""Ended jobs that Slurm still lists."""
JUDGED = 100
"""At one of so many jobs everything is judged."""


class Life:
    """A cluster in which one job after the other runs for a while and fails, judged all the time."""

    def __init__(self) -> None:
        self.state = ClusterState(silent_after_s=15, report_lifetime_s=60)
        self.judge = Judge(Config(), self.state, (), lambda: "id", lambda kind: None)
        self.now, self.sequence = 1000.0, 0

    def live(self, jobs: range, nodes: int = 4) -> None:
        for number in jobs:
            self.now += 30.0
            name = f"n{number % nodes}"
            older = [
                slurm_job(job_id=str(n), state="FAILED", nodes=(f"n{n % nodes}",), name=f"j{n}", user="u")
                for n in range(max(0, number - LISTED), number)
            ]
            mine = slurm_job(job_id=str(number), nodes=(name,), name=f"j{number}", user="u")
            listed = tuple(
                SlurmNode(name=f"n{n % nodes}", address="", state="ALLOCATED")
                for n in range(max(0, number - 3), number + 1)
            )
            self.state.apply_slurm(SlurmView(jobs=(*older, mine), nodes=listed), self.now)
            self._report(name, str(number))
            if number % JUDGED == 0:
                self.judge.conclude(self.judge.detect(self.now), self.now, self.now)

    def _report(self, node: str, job_id: str) -> None:
        self.sequence += 1
        pid = 100 + 4 * self.sequence
        events = (
            Event(kind=EventKind.PROGRESS, job_id=job_id, age_s=0, source=f"log.{job_id}", pattern="megatron", step=3, loss=2.0),
            Event(kind=EventKind.ERROR, job_id=job_id, age_s=0, source=f"log.{job_id}", pattern="traceback", line="Traceback", rank=0),
        )  # fmt: skip
        uuid = f"GPU-{node}"
        self.state.apply_report(
            Report(
                node=node, boot_id="b", agent_id="a", sequence=self.sequence,
                processes=tuple(
                    process(rank, pid=pid + rank, start_ticks=pid, job_id=job_id, blocked=blocked(5.0, mount=f"/scratch/{job_id}"))
                    for rank in range(2)
                ),
                logs=(LogFile(job_id=job_id, path=f"log.{job_id}", growth_age_s=1.0, offset=100),),
                events=events,
                mounts=(MountProbe(mount=f"/scratch/{job_id}", responding=True, seconds=0.1, wrote=True),),
                gpus=(Gpu(uuid=uuid, index=0, utilization_ratio=1.0, pids=(pid,)),),
                gpu_holders=(GpuHolder(pid=pid + 3, start_ticks=pid, uid=1, user="u", comm="c", state="S", gpu_uuids=(uuid,)),),
                node_events=(
                    NodeEvent(source="kernel_log", name="xid", severity=FaultSeverity.INFO, age_s=0, xid=13, line="x", sequence=self.sequence),
                ),
            ),
            self.now,
        )  # fmt: skip

    @property
    def size(self) -> int:
        return held((self.state, self.judge), set())


def test_state_of_six_thousand_jobs_that_have_ended_is_no_larger_than_of_three_thousand() -> None:
    life = Life()
    life.live(range(3000))
    before = life.size
    life.live(range(3000, 6000))
    assert life.size <= 1.05 * before


def test_a_node_that_slurm_does_not_know_any_more_is_forgotten_a_day_after_its_last_word() -> None:
    """Nodes of a cloud have a new name each time."""
    life = Life()
    life.live(range(300), nodes=10**9)
    before = life.size
    assert len(life.state.agents.known()) == 300
    life.now += KEPT_NODE_S
    life.live(range(300, 600), nodes=10**9)
    assert len(life.state.agents.known()) == 300
    assert life.size <= 1.1 * before


def test_a_silent_node_that_slurm_still_has_is_remembered() -> None:
    life = Life()
    life.live(range(8), nodes=4)
    life.now += 3 * KEPT_NODE_S
    life.live(range(8, 10), nodes=4)
    assert life.state.agents.known() == ("n0", "n1", "n2", "n3")


def test_of_nodes_that_slurm_does_not_list_no_more_than_a_bound_are_taken_and_those_that_it_lists_always() -> None:
    state = ClusterState(silent_after_s=15, report_lifetime_s=60)
    node = SlurmNode(name="n1", state="IDLE", address="10.0.0.1")
    state.apply_slurm(SlurmView(jobs=(), nodes=(node,)), 0.0)

    def report(name: str) -> str:
        return state.apply_report(Report(node=name, boot_id="b", agent_id="a", sequence=1), 1.0)

    assert {report(f"x{number}") for number in range(MAX_STRANGERS)} == {"accepted"}
    assert (report("one-more"), report("n1")) == ("no_room", "accepted")
