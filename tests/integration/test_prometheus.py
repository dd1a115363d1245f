"""What Prometheus and Alertmanager make of us: the real programs, our files as they are shipped, a real
controller with a hang."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.monitoring import Alertmanager, Prometheus, Receivers, Textfiles, ensure_prometheus
from tests.rig.cluster import Cluster
from tests.rig.stack import PORT, Watchdog, train_script

SHIPPED = Path(__file__).parents[2] / "deploy" / "prometheus"


@pytest.fixture(autouse=True)
def prometheus_is_there() -> None:
    ensure_prometheus()


def check(*argv: str) -> None:
    done = subprocess.run(argv, cwd=SHIPPED, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_and_alertmanager_accept_the_shipped_files() -> None:
    check("promtool", "check", "config", "prometheus.example.yaml")
    check("promtool", "check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml")
    check("amtool", "check-config", "alertmanager.example.yaml")


def test_every_alert_fires_where_it_should_and_nowhere_else() -> None:
    check("promtool", "test", "rules", "alerts_test.yaml")
    tested = (SHIPPED / "alerts_test.yaml").read_text()
    for alert in re.findall(r"- alert: (\w+)", (SHIPPED / "alerts.yaml").read_text()):
        assert f'alertname="{alert}"' in tested, f"no test sees {alert} fire"


@pytest.fixture
def textfiles(cluster: Cluster) -> Iterator[Textfiles]:
    textfiles = Textfiles(cluster)
    yield textfiles
    textfiles.close()


@pytest.fixture
def watchdog(cluster: Cluster) -> Iterator[Watchdog]:
    with Watchdog(cluster, mode="observe") as watchdog:
        yield watchdog


@pytest.mark.thorough
def test_a_hang_reaches_the_pager_and_every_series_passes_the_lint(
    cluster: Cluster, textfiles: Textfiles, watchdog: Watchdog, tmp_path: Path
) -> None:
    receivers = Receivers()
    routing = (SHIPPED / "alertmanager.example.yaml").read_text().replace("http://localhost:8081", receivers.url)
    alertmanager = Alertmanager(tmp_path, re.sub(r"group_wait: \d+s", "group_wait: 1s", routing))
    rules = tmp_path / "alerts.yaml"
    rules.write_text(re.sub(r"for: \d+m$", "for: 2s", (SHIPPED / "alerts.yaml").read_text(), flags=re.MULTILINE))
    agents = list(textfiles.targets.values())
    targets = {"controller": [f"{cluster.controller_address}:{PORT}"], "agent": agents}
    prometheus = Prometheus(tmp_path, targets, rules, alertmanager.address)
    try:
        faults = cluster.shared / "faults"
        faults.mkdir(exist_ok=True)
        faults.chmod(0o777)
        job = cluster.sbatch(train_script(cluster, f"--step-seconds 0.3 --steps 100000 --fault-dir {faults}"), "-N2")
        watchdog.wait_for(lambda: watchdog.step(job) > 5, 60, "the job to make steps")
        prometheus.wait_for(lambda: prometheus.query("up") and not prometheus.query("up == 0"), 30, "all targets up")
        ringing = 'ALERTS{severity=~"page|ticket",alertstate="firing"}'
        prometheus.wait_for(lambda: not prometheus.query(ringing), 30, "a healthy job rings nobody")
        for target in (*targets["controller"], *agents):
            lint(target)
        (faults / "dataloader_hang.rank1").touch()
        alert = prometheus.wait_for(
            lambda: [a for a in receivers.alerts("page") if a["labels"]["alertname"] == "SlurmWatchdogJobHangs"],
            90,
            "the pager to ring",
        )[0]
        assert alert["labels"]["job_id"] == job
        assert f"Job {job} has made no step for" in alert["annotations"]["summary"]
        assert receivers.alerts("dead-man"), "the dead man's switch hears that all is well"
    finally:
        prometheus.close()
        alertmanager.close()
        receivers.close()


def lint(target: str) -> None:
    """promtool's own judgement of names, types and help texts."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=180) as answer:
        text = answer.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=180)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, f"{target}: {said}"
