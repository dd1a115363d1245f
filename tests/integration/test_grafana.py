"""Every query of every panel, asked of a real Prometheus that scrapes a real controller and agents with a
hang among them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.monitoring import Prometheus, Textfiles, ensure_prometheus
from tests.rig.cards import SimulatedCards
from tests.rig.cluster import Cluster
from tests.rig.stack import PORT, Watchdog, train_script
from tests.rig.standin_nvml import standin

pytest.importorskip("grafana_foundation_sdk", reason="its releases need Python 3.11")
from tools.docs.grafana import MAY_BE_EMPTY

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev"),
]


@pytest.fixture
def cards(cluster: Cluster) -> Iterator[SimulatedCards]:
    with SimulatedCards(cluster) as cards:
        yield cards


SAID_HERE = ("errors in the log",)
"""Excused on a healthy cluster, and not in this test."""
ACTING = ("ladder", "operations of the ladder")
"""Titles of what shows something only while an action is under way."""


def filled_in(expression: str, job: str, node: str) -> str:
    for name, value in {"job": job, "node": node, "__range": "10m", "hours": "4"}.items():
        expression = expression.replace(f"${name}", value)
    return expression


def asked(document: Any) -> Iterator[tuple[str, str]]:
    """(title, query) of every target of every panel, and of every annotation."""
    for panel in document["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for mark in document["annotations"]["list"]:
        yield mark["name"], mark["expr"]


def values_of(query: str, prometheus: Prometheus) -> set[str]:
    """What Grafana offers for a variable: the answer to label_values(SERIES, LABEL)."""
    match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
    assert match, query
    return {row["metric"][match[2]] for row in prometheus.query(match[1])}


def test_every_panel_shows_data_on_a_cluster_with_a_hang(
    cluster: Cluster, cards: SimulatedCards, tmp_path: Path
) -> None:
    ensure_prometheus()
    textfiles = Textfiles(cluster)
    nodes = textfiles.targets
    targets = {"controller": [f"{cluster.controller_address}:{PORT}"], "agent": list(nodes.values())}
    faults = cluster.shared / "faults"
    faults.mkdir(exist_ok=True)
    faults.chmod(0o777)
    (faults / "dataloader_hang.rank1").unlink(missing_ok=True)  # of a first try in the same cluster
    options = f"--step-seconds 0.3 --steps 100000 --save-interval 10 --fault-dir {faults}"
    # Before the agents: they read a card's processes when they start, and then once a minute.
    job = cluster.sbatch(train_script(cluster, options), "-N2", f"--output={cluster.shared}/job-%j.out")
    cluster.wait_for_job_state(job, "RUNNING")
    time.sleep(2)
    with Watchdog(cluster, mode="observe", agent_env=cards.environment) as watchdog:
        prometheus = Prometheus(tmp_path, targets)
        try:
            watchdog.wait_for(lambda: watchdog.step(job) > 15, 60, "the job to make steps")
            prometheus.wait_for(
                lambda: len(prometheus.query("slurm_watchdog_gpu_job")) == 4, 90, "cards with their ranks"
            )
            (faults / "dataloader_hang.rank1").touch()
            watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 60, "the hang to be told")
            with (cluster.shared / f"job-{job}.out").open("a") as log:
                log.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
            firing = 'slurm_watchdog_incidents{kind="collective_hang",state="firing"} == 1'
            prometheus.wait_for(lambda: prometheus.query(firing), 20, "the hang to be scraped")
            said = f'slurm_watchdog_job_log_errors{{job_id="{job}"}} > 0'
            prometheus.wait_for(lambda: prometheus.query(said), 300, "the error line to be scraped")
            empty = []
            for file in sorted(DASHBOARDS.iterdir()):
                document = json.loads(file.read_text())
                for variable in document["templating"]["list"]:
                    if variable["type"] == "query":
                        offered = values_of(variable["query"], prometheus)
                        assert {job, nodes["n1"]} & offered, f"{file.name}: {variable['name']} offers {offered}"
                for title, expression in asked(document):
                    found = prometheus.query(filled_in(expression, job, nodes["n1"]))
                    excused = any(part in title for part in MAY_BE_EMPTY if part not in SAID_HERE)
                    if not found and not excused:
                        empty.append(f"{file.name}: {title}: {expression}")
            assert not empty, "\n".join(empty)
            ranks = {
                row["metric"]["rank"]
                for row in prometheus.query(
                    f'slurm_watchdog_gpu_utilization_ratio * on (gpu_uuid) group_left (job_id, rank) max by (gpu_uuid, job_id, rank) (slurm_watchdog_gpu_job{{job_id="{job}"}})'
                )
            }
            assert ranks == {"0", "1", "2", "3"}
            # Last, for it takes the job away: an action is under way for a while, from its first operation on.
            assert watchdog.command("restart", job, "--now", "--no-wait").returncode == 0
            document = json.loads((DASHBOARDS / "job.json").read_text())
            for title, expression in asked(document):
                if title in ACTING:
                    query = filled_in(expression, job, nodes["n1"])
                    prometheus.wait_for(lambda query=query: prometheus.query(query), 300, title)
        finally:
            prometheus.close()
            textfiles.close()
