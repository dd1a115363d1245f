"""Evidence and diagnosis, whole: a real Slurm, real agents, real ranks that stand still.

Nothing here waits for a time: a job is asked again until the answer is there, or the test's patience is over.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training_job import inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

PATIENCE_S = 120.0


UNTOUCHED = ("--comment=watchdog=off",)
"""A job that is watched, and only watched."""


@pytest.fixture(scope="module")
def watchdog(cluster_of_the_run: Cluster) -> Iterator[Watchdog]:
    """One for all tests here: it takes a while to start."""
    with Watchdog(cluster_of_the_run, mode="act") as acting:
        yield acting


def diagnose(watchdog: Watchdog, job: str) -> tuple[int, dict[str, Any]]:
    done = watchdog.command("diagnose", job, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def states(watchdog: Watchdog) -> list[str]:
    """The letters of all processes that any namespace of the cluster holds, our own included."""
    found = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line.split()[0][0] for line in found.splitlines() if "trainer.py" in line]


def until_it_hangs(watchdog: Watchdog, job: str, scope: str | None = None) -> dict[str, Any]:
    """Asks again and again until the answer is that the job hangs (and whose fault a blocked filesystem is)."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        code, found = diagnose(watchdog, job)
        assert code == {True: 1, False: 0, None: 3}[found["is_hang"]], found
        known = scope is None or [each["scope"] for each in found["filesystems"]] == [scope]
        if found["is_hang"] and known:
            return found
        assert found["is_hang"] or not found["culprits"], "accused in a job that does not hang"
        assert time.monotonic() < deadline, found


def steps(cluster: Cluster, job: str) -> list[float]:
    """Seconds of each step so far, as the trainer logs them."""
    text = (cluster.directory / "log" / f"job-{job}.out").read_text()
    return [float(each) for each in re.findall(r"elapsed time per iteration \(s\): ([\d.]+)", text)]


def test_a_healthy_job_is_not_disturbed_and_the_rank_in_its_data_loader_is_named(
    cluster: Cluster, watchdog: Watchdog
) -> None:
    job = submit(cluster, nodes=2, sbatch=UNTOUCHED)
    training(watchdog, job, at_least=12)
    before = steps(cluster, job)
    code, found = diagnose(watchdog, job)
    during = steps(cluster, job)[len(before) :]
    assert (code, found["is_hang"], found["class"], found["culprits"]) == (0, False, "progressing", []), found
    assert (found["ranks"], found["missing"], found["undumped"]) == (4, [], [])
    assert "T" not in states(watchdog)
    assert statistics.median(during) < 1.5 * statistics.median(before), (before, during)
    inject(cluster, "dataloader_hang.rank3")
    found = until_it_hangs(watchdog, job)
    assert (found["kind"], found["class"]) == ("collective_hang", "dataloader"), found
    (culprit,) = found["culprits"]
    assert (culprit["rank"], culprit["host"]) == (3, "n2")
    assert culprit["pid"] > 0
    assert sorted(rank for group in found["groups"] for rank in group["ranks"]) == [0, 1, 2, 3]
    assert "T" not in states(watchdog)


@pytest.mark.thorough
def test_evidence_is_kept_with_the_incident_and_goes_into_a_bundle(
    cluster: Cluster, watchdog: Watchdog, tmp_path: Path
) -> None:
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    inject(cluster, "lock.rank1")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), PATIENCE_S, "the hang to be found")

    def requeued() -> Any:
        return next((a for a in watchdog.explain(incident["id"])["actions"] if len(a["operations"]) > 1), None)

    action = watchdog.wait_for(requeued, PATIENCE_S, "the action to go on")
    assert (action["operations"][0]["operation"], action["operations"][0]["outcome"]) == (
        "evidence",
        "done",
    ), action
    assert action["operations"][1]["operation"] == "requeue_hold"
    done = watchdog.command("explain", incident["id"], "--json")
    whole = json.loads(done.stdout)
    nodes = {p["document"]["node"]: p["document"] for p in whole["evidence"] if p["kind"] == "node"}
    assert sorted(nodes) == ["n1", "n2"]
    ranks = [rank for node in nodes.values() for rank in node["ranks"] if rank["role"] == "rank"]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2, 3]
    (known,) = [p["document"] for p in whole["evidence"] if p["kind"] == "job"]
    dumps = {len(rank["dumps"]) for rank in ranks}
    assert dumps <= {1, 2, 3} and min(dumps) + len(known["snapshots"]) >= 3, "with those that the verdict rests on"
    assert all(dict(rank["environment"]).get("SLURM_PROCID") for rank in ranks)
    assert any(rank.get("sockets") for rank in ranks)
    assert any("step" in line for node in nodes.values() for _, lines in node.get("log_lines", []) for line in lines)
    (diagnosis,) = [p["document"] for p in whole["evidence"] if p["kind"] == "diagnosis"]
    assert [c["rank"] for c in diagnosis["culprits"]] == [1]
    assert any("evidence of 4 ranks from 2 of 2 nodes" in each["text"] for each in whole["timeline"])
    bundle = tmp_path / "incident.tar.gz"
    assert watchdog.command("explain", incident["id"], "--bundle", str(bundle)).returncode == 0
    with tarfile.open(bundle) as tar:
        stacks = tar.extractfile(f"incident-{incident['id']}/stacks/n1/rank-1.txt")
        assert stacks is not None
        assert "MainThread" in stacks.read().decode()
    words = watchdog.command("explain", incident["id"]).stdout
    assert "Groups" in words
    assert "evidence" in words


def test_a_rank_on_a_frozen_filesystem_is_named_with_its_file_and_the_others_answer(
    cluster: Cluster, watchdog: Watchdog
) -> None:
    for node in cluster.nodes:
        cluster.node_local(node).chmod(0o1777)
    job = submit(cluster, f"--log {cluster.scratch}/main_log.txt", nodes=2, sbatch=UNTOUCHED)
    training(watchdog, job)
    cluster.freeze(node="n2")
    found = until_it_hangs(watchdog, job, scope="one_node")
    assert found["class"] == "filesystem_stall", found
    culprit = found["culprits"][0]
    assert (culprit["rank"], culprit["host"], culprit["mount"]) == (3, "n2", str(cluster.scratch))
    assert culprit["path"].endswith("main_log.txt")
    assert "T" not in states(watchdog)


@pytest.mark.thorough
def test_a_node_that_is_cut_off_while_evidence_is_taken_is_a_row_with_the_reason(
    cluster: Cluster, watchdog: Watchdog
) -> None:
    job = submit(cluster, nodes=2, sbatch=UNTOUCHED)
    training(watchdog, job)
    started = watchdog.ask("POST", "/v1/diagnose", {"job_id": job})
    watchdog.stop_agent("n2", signal.SIGKILL)

    def over() -> Any:
        found = watchdog.ask("GET", f"/v1/diagnose/{started['id']}")
        return found if found["state"] == "done" else None

    found = watchdog.wait_for(over, PATIENCE_S, "the collection to give up on n2")
    nodes = {node["node"]: node for node in found["nodes"]}
    assert nodes["n1"]["state"] == "answered"
    assert nodes["n2"]["state"] == "failed"
    assert "agent on n2 does not report" in nodes["n2"]["error"]
    assert found["diagnosis"]["culprits"] == []
    undumped = {each["rank"]: each["reason"] for each in found["diagnosis"]["undumped"]}
    assert sorted(undumped) == [2, 3]
    assert "does not report" in undumped[2]
    watchdog.start_agent("n2")
    unknown = watchdog.command("diagnose", "999999")
    assert (unknown.returncode, "not watched" in unknown.stderr) == (3, True)
