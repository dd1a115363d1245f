"""The fleet says what agents say, and the benchmark of the controller works on a small one. How fast anything
is, is not tested here."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from lab.bench import at_scale, fleet_slurm, fleet_tls
from lab.bench.figures import Figures
from lab.bench.fleet_reports import Shape, events_of, logs_of, report_of
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.slurm.command_line import CommandLineSlurm

BOUNDS_OF_TIME = {
    "controller.event_loop_stall_max_ms", "controller.restart_stall_max_ms", "controller.receive_to_decision_p99_s",
    "controller.status_ms", "controller.metrics_ms", "controller.cpu_percent_of_core", "controller.reports_per_s",
}  # fmt: skip


def test_the_scripted_slurm_is_read_by_the_real_client(tmp_path: Path) -> None:
    shape = Shape(nodes=12, jobs=3)
    commands = fleet_slurm.install(tmp_path, shape)
    view = asyncio.run(CommandLineSlurm(bin_directory=str(commands)).read_view())
    assert [job.job_id for job in view.jobs] == ["100001", "100002", "100003"]
    assert view.jobs[1].nodes == ("n00004", "n00005", "n00006", "n00007")
    assert view.jobs[1].batch_host == "n00004"
    assert (len(view.nodes), {node.state for node in view.nodes}) == (12, {"ALLOCATED"})


def test_the_fleet_is_a_cluster_of_jobs_that_make_progress(tmp_path: Path) -> None:
    shape = Shape(nodes=4, jobs=2)
    slurm = CommandLineSlurm(bin_directory=str(fleet_slurm.install(tmp_path, shape)))
    state = ClusterState(silent_after_s=45.0, report_lifetime_s=30.0)
    state.apply_slurm(asyncio.run(slurm.read_view()), 0.0)
    for number in range(1, 6):
        for index in range(shape.nodes):
            report = replace(report_of(shape, index, number, 0), agent_id=str(index), sequence=number)
            if shape.is_batch_host(index):
                news = {"events": events_of(shape, index, number - 1, number), "logs": logs_of(shape, index, number)}
                report = replace(report, **news)
            assert state.apply_report(report, 5.0 * number) == "accepted"
    for job in state.view(26.0).jobs:
        assert [rank.process.rank for rank in job.ranks] == list(range(16))
        assert len(job.gpus) == 16
        assert job.progress is not None and job.progress.steps_seen == 5


def test_a_fleet_s_certificates_are_good_for_their_own_node_each(tmp_path: Path) -> None:
    fleet_tls.make(tmp_path, ["n00000", "n00001", "n00299"])
    for name in ("n00000", "n00001", "n00299"):
        file = tmp_path / "nodes" / f"{name}.crt"
        verify = [
            "openssl",
            "verify",
            "-x509_strict",
            "-purpose",
            "sslclient",
            "-CAfile",
            str(tmp_path / "ca/ca.crt"),
        ]
        subprocess.run([*verify, str(file)], check=True, capture_output=True, timeout=60)
        shown = ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", str(file)]
        assert f"DNS:{name}\n" in subprocess.run(shown, check=True, capture_output=True, text=True, timeout=60).stdout
    assert fleet_tls.reader(tmp_path).verify_mode == ssl.CERT_REQUIRED


@pytest.mark.thorough
def test_the_benchmark_measures_a_small_fleet_restarts_the_controller_and_leaves_nothing_behind() -> None:
    out = io.StringIO()
    figures = Figures(out)
    at_scale.run(
        figures,
        at_scale.Options(
            nodes=200, jobs=8, interval_s=1.0, seconds=6.0, warm_up_s=1.0, faults=2, outage=False, quiet_s=2.0, nice=0
        ),
    )  # fmt: skip
    rows = {row["bench"]: row for row in map(json.loads, out.getvalue().splitlines())}
    assert rows["controller.agents"]["value"] == 200
    assert rows["controller.faults_decided_ratio"]["value"] == 1.0
    assert rows["controller.false_incidents"]["value"] == 0
    assert rows["controller.restart_nodes_reporting"]["value"] == 200
    assert rows["controller.report_bytes"]["value"] < 9000
    assert set(figures.missed) <= BOUNDS_OF_TIME
