"""Our incidents in a real Alertmanager: it takes them, keeps them while they are told again, and ends them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.dispatcher import IncidentSources
from tests.builders.notices import INCIDENT, Ticking, replace
from tests.integration.monitoring import Alertmanager, Receivers, ensure_prometheus, get

SHIPPED = Path(__file__).parents[2] / "deploy" / "prometheus"


def wait_for(found: Any, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (answer := found()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return answer


@pytest.mark.thorough
def test_an_incident_rings_the_pager_through_the_shipped_routing_and_ends_by_itself(tmp_path: Path) -> None:
    ensure_prometheus()
    receivers = Receivers()
    routing = (SHIPPED / "alertmanager.example.yaml").read_text().replace("http://localhost:8081", receivers.url)
    for wait in ("group_wait: 30s", "group_wait: 10s", "group_interval: 5m"):
        routing = routing.replace(wait, f"{wait.split(':')[0]}: 1s")
    alertmanager = Alertmanager(tmp_path, routing)
    url = f"http://{alertmanager.address}"
    try:
        now = clock.wall()
        fires = replace(
            INCIDENT,
            opened_at=now - 60,
            fired_at=now - 1,
            summary='a "name" {{ .Labels }} <!channel> \u202e\x00',
        )
        told = Ticking(Journal("sqlite://"), now=now, config=f"{{alertmanager: {{urls: ['{url}']}}}}")
        job = SlurmJob(job_id="7", state="RUNNING", user="ann", partition="large", name="gpt")
        told.notifier.attach(IncidentSources(job_of={"7": job}.get, firing=lambda: [fires]))
        told.notifier.opened(fires)
        asyncio.run(told.run_until(now + 130.0))  # and told again twice
        (alert,) = get(f"{url}/api/v2/alerts")
        assert alert["labels"] == {
            "alertname": "SlurmWatchdogIncident", "cluster": "a", "kind": "collective_hang", "severity": "page",
            "incident": "i1", "job_id": "7",
        }  # fmt: skip
        assert alert["annotations"]["job"] == "7 gpt of ann in large"
        paged = wait_for(lambda: receivers.alerts("page"))[0]
        assert paged["status"] == "firing"
        assert paged["annotations"]["summary"].startswith('Rank 3 on n1: a "name" {{ .Labels }} <!channel>')
        told.notifier.resolved(replace(fires, resolved_at=clock.wall(), resolution="steps again"))
        told.notifier.attach(IncidentSources())
        asyncio.run(told.run_until_empty())
        over = wait_for(lambda: [a for a in receivers.alerts("page") if a["status"] == "resolved"])[0]
        assert "steps again" in over["annotations"]["description"]
    finally:
        alertmanager.close()
        receivers.close()
