"""Every query of every panel, asked of a real Prometheus that scrapes a real controller and agents with a hang among them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.cards import SimulatedCards
from deploy.demo.cluster import Cluster
from deploy.demo.stack import PORT, Watchdog, train_script
from deploy.grafana.generate import MAY_BE_EMPTY
from deploy.standin_nvml import standin
from tests.integration.monitoring import Prometheus, ensure_prometheus

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
AGENT_PORT = 9766

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev"),
]


@pytest.fixture
def cards(cluster: Cluster) -> Iterator[SimulatedCards]:
    with SimulatedCards(cluster) as cards:
        yield cards


def filled_in(expression: str, job: str, node: str) -> str:
    return expression.replace("$job", job).replace("$node", node)


def values_of(query: str, prometheus: Prometheus) -> set[str]:
    """What Grafana offers for a variable: the answer to label_values(SERIES, LABEL)."""
    match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
    assert match, query
    return {row["metric"][match[2]] for row in prometheus.query(match[1])}


def test_every_panel_shows_data_on_a_cluster_with_a_hang(
    cluster: Cluster, cards: SimulatedCards, tmp_path: Path
) -> None:
    ensure_prometheus()
    settings: dict[str, dict[str, Any]] = {"agent": {"metrics_listen": f"0.0.0.0:{AGENT_PORT}"}}
    nodes = {node: f"{cluster.layout.address(node)}:{AGENT_PORT}" for node in cluster.nodes}
    targets = {"controller": [f"{cluster.controller_address}:{PORT}"], "agent": list(nodes.values())}
    faults = cluster.shared / "faults"
    faults.mkdir(exist_ok=True)
    options = f"--step-seconds 0.3 --steps 100000 --save-interval 10 --fault-dir {faults}"
    # Before the agents: they read a card's processes when they start, and then once a minute.
    job = cluster.sbatch(train_script(cluster, options), "-N2")
    cluster.wait_for_job_state(job, "RUNNING")
    time.sleep(2)
    with Watchdog(cluster, mode="observe", settings=settings, agent_env=cards.environment) as watchdog:
        prometheus = Prometheus(tmp_path, targets)
        try:
            watchdog.wait_for(lambda: watchdog.step(job) > 15, 60, "the job to make steps")
            prometheus.wait_for(
                lambda: len(prometheus.query("slurm_watchdog_gpu_job")) == 4, 90, "cards with their ranks"
            )
            (faults / "dataloader_hang.rank1").touch()
            watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 60, "the hang to be told")
            firing = 'slurm_watchdog_incidents{kind="collective_hang",state="firing"} == 1'
            prometheus.wait_for(lambda: prometheus.query(firing), 20, "the hang to be scraped")
            empty = []
            for file in sorted(DASHBOARDS.iterdir()):
                document = json.loads(file.read_text())
                for variable in document["templating"]["list"]:
                    if variable["type"] == "query":
                        offered = values_of(variable["query"], prometheus)
                        assert {job, nodes["n1"]} & offered, (
                            f"{file.name}: {variable['name']} offers {offered}"
                        )
                for panel in document["panels"]:
                    for target in panel["targets"]:
                        found = prometheus.query(filled_in(target["expr"], job, nodes["n1"]))
                        excused = any(part in panel["title"] for part in MAY_BE_EMPTY)
                        if not found and not excused:
                            empty.append(f"{file.name}: {panel['title']}: {target['expr']}")
            assert not empty, "\n".join(empty)
            ranks = {row["metric"]["rank"] for row in prometheus.query(
                f'slurm_watchdog_gpu_utilization_ratio * on (gpu_uuid) group_left (job_id, rank) max by (gpu_uuid, job_id, rank) (slurm_watchdog_gpu_job{{job_id="{job}"}})'
            )}  # fmt: skip
            assert ranks == {"0", "1", "2", "3"}
        finally:
            prometheus.close()
