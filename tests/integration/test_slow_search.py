"""A node with a slow link, on a real Slurm: the job becomes slow, the search names the node by restarts of its own, and
the job runs at its old speed without it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.integration.training_job import submit, training
from tests.rig import throttle
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

SETTINGS = {
    "policy": {
        "slow_search": "active",
        "slow_search_restarts": 6,
    },
    "detectors": {"slow_job": {"lasts": "15s"}},
}
STEP = ("--step-seconds", "0.5", "--jitter", "0.005")
BEFORE = 110
"""Steps whose speed is known before the node becomes slow."""


@pytest.fixture
def five_nodes(cluster_possible: None) -> Iterator[Cluster]:
    """Two for the job, one free, and two in use."""
    with Cluster(nodes=5) as cluster:
        yield cluster


def speed(cluster: Cluster, job: str) -> float:
    """Seconds of a step at the moment, as the job's log says: the median of the newest ones."""
    text = (Path(cluster.directory) / "log" / f"job-{job}.out").read_text()
    return median(float(value) for value in re.findall(r"elapsed time per iteration \(s\): ([0-9.]+)", text)[-15:])


@pytest.mark.timeout(900)
def test_a_slow_link_is_found_by_restarts_and_the_job_is_as_fast_as_before_without_it(five_nodes: Cluster) -> None:
    cluster = five_nodes
    with Watchdog(cluster, mode="act", settings=SETTINGS) as watchdog:
        # One node is free in place of another: with more of them Slurm may give the job none of its old ones.
        cluster.sbatch("#!/bin/bash\nsleep 3600\n", "-N2", "--exclusive", "--nodelist=n4,n5")
        job = submit(cluster, *STEP)
        training(watchdog, job, at_least=10)
        watchdog.wait_for(lambda: watchdog.step(job) >= BEFORE, 120, "steps to compare with")
        fast, bad = speed(cluster, job), cluster.job(job)["BatchHost"]
        with throttle.link_delay(cluster, bad, 0.02):
            watchdog.wait_for(lambda: watchdog.firing(job, "slow_job"), 120, "the slower steps to be reported")
            slow = speed(cluster, job)
            found = watchdog.wait_for(
                lambda: next((node for node in watchdog.ask("GET", "/v1/nodes")["nodes"] if node["node"] == bad), None),
                300,
                "the node to be named",
            )
            print(found)
            named = watchdog.command("nodes", bad).stdout
            assert f"{bad} makes a step of job {job}" in named, named
            watchdog.wait_for(lambda: bad not in cluster.job(job)["NodeList"], 60, "the job without it")
            step = watchdog.step(job)
            watchdog.wait_for(lambda: watchdog.step(job) >= step + 20, 60, "the job without it to train")
            again = speed(cluster, job)
            print(f"{fast:.3f} s a step, {slow:.3f} s with {bad}, {again:.3f} s without it")
            assert slow > 1.05 * fast and abs(again - fast) < 0.05 * fast
