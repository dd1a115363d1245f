"""A user whose processes are too many to be looked at is named: in `status`, and as a series."""

from __future__ import annotations

from slurm_watchdog.controller.health.metrics import MAX_CROWDS, ControllerMetrics
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.report import LeftOut, Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.views import slurm_job


def report(sequence: int, *left_out: LeftOut) -> Report:
    return Report(node="n1", boot_id="b", agent_id="a", sequence=sequence, left_out=left_out)


def state(*jobs: str) -> ClusterState:
    found = ClusterState(silent_after_s=15, report_lifetime_s=60)
    nodes = (SlurmNode(name="n1", address="", state="ALLOCATED"),)
    listed = tuple(slurm_job(job_id=job, nodes=("n1",), uid=1500) for job in jobs)
    found.apply_slurm(SlurmView(jobs=listed, nodes=nodes), 0.0)
    return found


def test_crowds_name_node_user_and_job() -> None:
    cluster, metrics = state("7"), ControllerMetrics()
    for sequence in range(1, 4):
        cluster.apply_report(report(sequence, LeftOut(job_id="7", uid=1500, count=55_000)), float(sequence))
    shortages = cluster.left_out.lately(3.0)
    metrics.show_crowds(shortages)
    assert (shortages[0].whose, shortages[0].uid, shortages[0].job_id) == ("n1", 1500, "7")
    assert b'slurm_watchdog_processes_left_out{job_id="7",uid="1500"} 55000.0' in metrics.text()
    metrics.show_crowds(cluster.left_out.lately(100.0))
    assert b"processes_left_out{" not in metrics.text()


def test_crowds_of_a_job_that_slurm_does_not_list_repeat_nothing_of_what_a_node_says() -> None:
    cluster, metrics = state("7"), ControllerMetrics()
    cluster.apply_report(report(1, LeftOut(job_id='8"} 1', uid=1500, count=3000)), 1.0)
    (shortage,) = cluster.left_out.lately(1.0)
    assert (shortage.uid, shortage.job_id) == (1500, None)
    metrics.show_crowds((shortage,))
    assert b"processes_left_out{" not in metrics.text()


def test_crowds_by_the_hundred_get_a_bounded_number_of_series() -> None:
    jobs, metrics = [str(number) for number in range(100, 100 + 3 * MAX_CROWDS)], ControllerMetrics()
    cluster = state(*jobs)
    for number, job in enumerate(jobs):
        cluster.left_out.note("processes", f"n{number}", 10 + number, 1500, job)
    metrics.show_crowds(cluster.left_out.lately(0.0))
    assert metrics.text().count(b"processes_left_out{") == MAX_CROWDS
    assert f'processes_left_out{{job_id="{jobs[-1]}",uid="1500"}}'.encode() in metrics.text()
