"""Evidence and diagnosis, whole: a real Slurm, real agents, real ranks that stand still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.cluster import Cluster
from deploy.demo.stack import Watchdog
from tests.integration.test_main_job import inject, submit, training


@pytest.fixture
def watch(cluster: Cluster) -> Iterator[Callable[..., Watchdog]]:
    started: list[Watchdog] = []

    def start(**options: Any) -> Watchdog:
        watchdog = Watchdog(cluster, **options)
        started.append(watchdog)
        return watchdog.__enter__()

    yield start
    for watchdog in started:
        watchdog.close()


def diagnose(watchdog: Watchdog, job: str) -> tuple[int, dict[str, Any]]:
    done = watchdog.command("diagnose", job, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def states(watchdog: Watchdog) -> list[str]:
    """The letters of all processes that any namespace of the cluster holds, our own included."""
    found = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line.split()[0][0] for line in found.splitlines() if "trainer.py" in line]


def step_seconds(watchdog: Watchdog, job: str, seconds: float) -> float:
    first, began = watchdog.step(job), time.monotonic()
    time.sleep(seconds)
    return (time.monotonic() - began) / max(1, watchdog.step(job) - first)


def test_a_healthy_job_is_not_disturbed_and_the_rank_in_its_data_loader_is_named(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    before = step_seconds(watchdog, job, 4)
    code, found = diagnose(watchdog, job)
    after = step_seconds(watchdog, job, 4)
    assert (code, found["is_hang"], found["class"], found["culprits"]) == (0, False, "progressing", []), found
    assert (found["ranks"], found["missing"], found["undumped"]) == (4, [], [])
    assert "T" not in states(watchdog)
    assert after < 1.5 * before, (before, after)
    inject(cluster, "dataloader_hang.rank3")
    time.sleep(8)  # the limit of the detectors here
    began = time.monotonic()
    code, found = diagnose(watchdog, job)
    assert time.monotonic() - began < 60
    assert (code, found["is_hang"], found["kind"], found["class"]) == (
        1,
        True,
        "collective_hang",
        "dataloader",
    ), found
    (culprit,) = found["culprits"]
    assert (culprit["rank"], culprit["host"]) == (3, "n2")
    assert culprit["pid"] > 0
    assert sorted(rank for group in found["groups"] for rank in group["ranks"]) == [0, 1, 2, 3]
    assert "T" not in states(watchdog)


def test_evidence_is_kept_with_the_incident_and_goes_into_a_bundle(
    cluster: Cluster, watch: Callable[..., Watchdog], tmp_path: Path
) -> None:
    watchdog = watch(mode="act")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    inject(cluster, "lock.rank1")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 40, "the hang to be found")

    def requeued() -> Any:
        return next((a for a in watchdog.explain(incident["id"])["actions"] if len(a["rungs"]) > 1), None)

    action = watchdog.wait_for(requeued, 60, "the action to go on")
    assert (action["rungs"][0]["rung"], action["rungs"][0]["outcome"]) == ("evidence", "done"), action
    assert action["rungs"][1]["rung"] == "requeue_hold"
    done = watchdog.command("explain", incident["id"], "--json")
    whole = json.loads(done.stdout)
    nodes = {p["document"]["node"]: p["document"] for p in whole["evidence"] if p["kind"] == "node"}
    assert sorted(nodes) == ["n1", "n2"]
    ranks = [rank for node in nodes.values() for rank in node["ranks"] if rank["role"] == "rank"]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2, 3]
    assert all(len(rank["dumps"]) == 3 for rank in ranks)
    assert all(dict(rank["environment"]).get("SLURM_PROCID") for rank in ranks)
    assert any(rank.get("sockets") for rank in ranks)
    assert any(
        "step" in line for node in nodes.values() for _, lines in node.get("log_lines", []) for line in lines
    )
    (diagnosis,) = [p["document"] for p in whole["evidence"] if p["kind"] == "diagnosis"]
    assert [c["rank"] for c in diagnosis["culprits"]] == [1]
    assert any("evidence of 4 ranks from 2 of 2 nodes" in each["text"] for each in whole["timeline"])
    bundle = tmp_path / "incident.tar.gz"
    assert watchdog.command("explain", incident["id"], "--bundle", str(bundle)).returncode == 0
    with tarfile.open(bundle) as tar:
        stacks = tar.extractfile(f"incident-{incident['id']}/n1/rank-1/stacks.txt")
        assert stacks is not None
        assert "MainThread" in stacks.read().decode()
    words = watchdog.command("explain", incident["id"]).stdout
    assert "Groups" in words
    assert "evidence" in words


def test_a_rank_on_a_frozen_filesystem_is_named_with_its_file_and_the_others_answer(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    for node in cluster.nodes:
        cluster.node_local(node).chmod(0o1777)
    job = submit(cluster, f"--log {cluster.scratch}/main_log.txt", nodes=2)
    training(watchdog, job)
    cluster.freeze(node="n2")
    time.sleep(9)
    code, found = diagnose(watchdog, job)
    assert (code, found["is_hang"], found["class"]) == (1, True, "filesystem_stall"), found
    culprit = found["culprits"][0]
    assert (culprit["rank"], culprit["host"], culprit["mount"]) == (3, "n2", str(cluster.scratch))
    assert culprit["path"].endswith("main_log.txt")
    (verdict,) = found["filesystems"]
    assert verdict["scope"] == "one_node", verdict
    assert "T" not in states(watchdog)


def test_a_node_that_is_cut_off_while_evidence_is_taken_is_a_row_with_the_reason(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    started = watchdog.ask("POST", "/v1/diagnose", {"job_id": job})
    time.sleep(1.5)
    agent = watchdog.agents["n2"]
    os.kill(agent.pid, signal.SIGKILL)
    watchdog.stop_agent("n2", signal.SIGKILL)

    def over() -> Any:
        found = watchdog.ask("GET", f"/v1/diagnose/{started['id']}")
        return found if found["state"] == "done" else None

    found = watchdog.wait_for(over, 60, "the collection to give up on n2")
    nodes = {node["node"]: node for node in found["nodes"]}
    assert nodes["n1"]["state"] == "answered"
    assert nodes["n2"]["state"] == "failed"
    assert "agent on n2 does not report" in nodes["n2"]["error"]
    assert found["diagnosis"]["culprits"] == []
    undumped = {each["rank"]: each["reason"] for each in found["diagnosis"]["undumped"]}
    assert sorted(undumped) == [2, 3]
    assert "does not report" in undumped[2]
    unknown = watchdog.command("diagnose", "999999")
    assert (unknown.returncode, "not watched" in unknown.stderr) == (3, True)
