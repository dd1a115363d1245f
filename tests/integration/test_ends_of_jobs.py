"""How jobs end on a real Slurm: one that fails is one incident with rank, node and cost, whatever else it
prints; normal ends are none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog, train_script

TELLS_LATE_S = 10.0
"""A run that has ended is judged within some seconds; nobody has said anything by then about those that ended well."""


@pytest.fixture
def watchdog(cluster: Cluster) -> Iterator[Watchdog]:
    with Watchdog(cluster, mode="observe") as watchdog:
        yield watchdog


def submit(cluster: Cluster, *options: str, nodes: int = 1, tail: str = "") -> str:
    logs = Path(cluster.directory) / "log"
    logs.chmod(0o1777)
    script = train_script(cluster, "--step-seconds 0.3 --save-interval 10", *options)
    script = script.replace("srun ", "srun --kill-on-bad-exit=1 ").replace("exit $code", f"{tail}\nexit $code")
    return cluster.sbatch(script, f"-N{nodes}", f"--output={logs}/job-%j.out")


def ends(watchdog: Watchdog, cluster: Cluster, job: str, state: str) -> None:
    watchdog.wait_for(lambda: cluster.job(job)["JobState"] == state, 90, f"job {job} to be {state}")


def alone(watchdog: Watchdog, job: str, kind: str) -> list[Any]:
    found = [i for i in watchdog.incidents(job) if not i["inhibited_by"]]
    return found if any(i["kind"] == kind for i in found) else []


def test_a_job_that_fails_is_one_incident_and_jobs_that_end_well_are_none(cluster: Cluster, watchdog: Watchdog) -> None:
    failing = submit(cluster, "--steps 100000", "--fault exception:rank=3,step=20", nodes=2)
    done = submit(cluster, "--steps 30")
    ends(watchdog, cluster, failing, "FAILED")
    ends(watchdog, cluster, done, "COMPLETED")
    cancelled = submit(cluster, "--steps 100000", nodes=2)
    watchdog.wait_for(lambda: watchdog.step(cancelled) > 3, 60, "the third job to make steps")
    cluster.slurm("scancel", cancelled)
    ends(watchdog, cluster, cancelled, "CANCELLED")
    time.sleep(TELLS_LATE_S)
    (incident,) = watchdog.incidents(failing)
    assert (incident["kind"], incident["state"]) == ("log_error", "firing")
    assert [(c["rank"], c["node"]) for c in incident["culprits"]] == [(3, "n2")]
    assert "fault injected by --fault exception" in incident["summary"]
    assert any("last complete checkpoint at step 10: 9 steps lost" in fact for fact in incident["evidence"])
    assert watchdog.incidents(done) == []
    assert watchdog.incidents(cancelled) == []


@pytest.mark.thorough
def test_a_job_that_restarts_and_dies_again_and_again_is_one_loop(cluster: Cluster, watchdog: Watchdog) -> None:
    again = "if [ $code != 0 ]; then scontrol requeue $SLURM_JOB_ID; sleep 20; fi"
    job = submit(cluster, "--steps 100000", "--fault exception:rank=1,step=1,always", tail=again)
    (incident,) = watchdog.wait_for(lambda: alone(watchdog, job, "crash_loop"), 120, "the loop to be told")
    assert incident["state"] == "firing"
    assert "fault injected by --fault exception" in incident["summary"]
    assert [culprit["rank"] for culprit in incident["culprits"]] == [1], watchdog.explain(incident["id"])
