"""An open incident outlives a stalled or restarted controller, a silent Slurm and silent agents: only what is
seen closes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.registry import SPECS
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.observations import Event, Process
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.reported_cluster import progress_event
from tests.builders.views import process, slurm_job

KINDS = [spec.kind for spec in SPECS]
STEPS = (IncidentKind.COLLECTIVE_HANG, IncidentKind.STALLED_PROGRESS, IncidentKind.LOG_ERROR)
"""Kinds that a new step closes."""
SUBJECTS = {
    IncidentKind.FILESYSTEM_OUTAGE: "mount:server:/shared", IncidentKind.FILESYSTEM_STALL: "mount:server:/shared", IncidentKind.PARTITION_OR_OUTAGE: "cluster",
    IncidentKind.NODE_DOWN: "node:n1", IncidentKind.AGENT_SILENT: "node:n1", IncidentKind.SLURM_UNREACHABLE: "slurm", IncidentKind.GPU_FAULT: "gpu:GPU-1",
    IncidentKind.ORPHAN_GPU_PROCESS: "holders:n1/1000", IncidentKind.DISK_FULL: "disk:n1:/shared", IncidentKind.CRASH_LOOP: "loop:7", IncidentKind.LOG_ERROR: "run:7.0",
}  # fmt: skip


def left_open(kind: IncidentKind) -> Incident:
    subject = SUBJECTS.get(kind, "job:7")
    about_job = subject in ("job:7", "run:7.0", "loop:7") or subject.startswith("mount:")
    return Incident(
        id=f"i-{kind}", kind=kind, subject=subject, state=IncidentState.FIRING, severity=Severity.CRITICAL, summary="it hangs",
        opened_at=0.0, fired_at=60.0, pending_mono=0.0, job_ids=("7",) if about_job else (), runs=(("7", 0),) if about_job else (),
        culprits=(Culprit(node="n1"),),
    )  # fmt: skip


class Life:
    """A controller's state and judge that find an incident in their journal, and a clock that the test moves."""

    def __init__(self, kind: IncidentKind) -> None:
        self.now = 10_000.0
        self.sequence = 0
        self.state = ClusterState(silent_after_s=30, report_lifetime_s=60)
        self.judge = Judge(Config(), self.state, [left_open(kind)], new_id=iter("abcdefghijkl").__next__)
        self.resolved: list[str] = []

    def slurm(self) -> None:
        node = SlurmNode(name="n1", address="n1", state="ALLOCATED")
        self.state.apply_slurm(SlurmView(jobs=(slurm_job(nodes=("n1",)),), nodes=(node,)), self.now)

    def report(self, *processes: Process, events: tuple[Event, ...] = ()) -> None:
        self.sequence += 1
        self.state.apply_report(
            Report(node="n1", boot_id="b", agent_id="a", sequence=self.sequence, processes=processes, events=events), self.now
        )  # fmt: skip

    def spend(self, seconds: int, each: Callable[[], None] = lambda: None) -> list[str]:
        for _ in range(0, seconds, 2):
            self.now += 2.0
            each()
            changes = self.judge.conclude(self.judge.detect(self.now), self.now, self.now)
            self.resolved += [c.after.resolution or "" for c in changes if c.is_over and c.after.id[:2] == "i-"]
        return self.resolved

    def stall(self, seconds: float) -> None:
        """As Controller.pieces does after a gap between two ticks."""
        self.now += seconds
        self.state.runs.grant_grace(self.now)
        self.state.forget_silence(self.now)


@pytest.mark.parametrize("kind", KINDS)
def test_incident_of_a_restarted_controller_stays_open_while_neither_slurm_nor_agents_answer(
    kind: IncidentKind,
) -> None:
    assert Life(kind).spend(600) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != IncidentKind.SLURM_UNREACHABLE])
def test_incident_stays_open_while_slurm_answers_and_no_agent_does(kind: IncidentKind) -> None:
    life = Life(kind)
    assert life.spend(600, life.slurm) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != IncidentKind.AGENT_SILENT])
def test_incident_stays_open_over_a_stall_of_the_controller_without_a_new_observation(
    kind: IncidentKind,
) -> None:
    life = Life(kind)
    life.slurm()
    life.stall(8.0)
    assert life.spend(20) == []


@pytest.mark.parametrize("kind", STEPS)
def test_hang_is_not_over_after_a_stall_until_a_new_step_is_seen(kind: IncidentKind) -> None:
    life = Life(kind)

    def reports(*events: Event) -> None:
        life.slurm()
        life.report(process(0, world_size=1), events=events)

    for step in range(1, 12):
        life.now += 2.0
        reports(progress_event(step))
    life.now += 300.0
    reports()
    life.stall(8.0)
    assert life.spend(40, reports) == []
    steps = iter(range(12, 60))
    assert len(life.spend(40, lambda: reports(progress_event(next(steps))))) == 1


def test_silent_agent_is_not_over_after_a_stall_until_it_reports() -> None:
    life = Life(IncidentKind.AGENT_SILENT)
    life.slurm()
    life.report()
    life.now += 300.0
    life.slurm()
    life.stall(8.0)
    assert life.spend(20, life.slurm) == []

    def heard() -> None:
        life.slurm()
        life.report()

    assert life.spend(30, heard) == ["the agent of n1 reports"]


def test_a_rank_that_an_agent_without_memory_has_not_read_yet_has_not_exited() -> None:
    life = Life(IncidentKind.COLLECTIVE_HANG)
    life.slurm()
    life.report(process(0, pid=7), process(1, pid=8))

    def gone(**said: object) -> set[int]:
        life.now, life.sequence = life.now + 5, life.sequence + 1
        report = Report(node="n1", boot_id="b", agent_id="later", sequence=life.sequence, **said)  # type: ignore[arg-type]
        assert life.state.apply_report(report, life.now) == "accepted"
        (job,) = life.state.view(life.now).jobs
        return {each.process.pid for each in job.processes if each.gone_s is not None}

    assert gone(unread=(7, 8)) == set()
    assert gone(processes=(process(1, pid=8),), unread=(7,)) == set()
    assert gone(processes=(process(1, pid=8),)) == {7}
