"""`test-nodes` on a real Slurm, run by an ordinary user: it names what is slow, and leaves no job behind."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.rig import throttle
from tests.rig.cluster import Cluster
from tests.rig.commands import wait_until
from tests.rig.node_tests import TestedNodes, bad_nodes


@pytest.fixture
def five_nodes(cluster_possible: None) -> Iterator[Cluster]:
    """The fewest with four peers each."""
    with Cluster(nodes=5) as cluster:
        yield cluster


@pytest.mark.exclusive
def test_a_slow_disk_and_a_slow_link_are_named_and_no_healthy_node(five_nodes: Cluster) -> None:
    tested = TestedNodes(five_nodes)
    short = tested.quick("--only", "disk,network", "--seconds", "0.2")
    with throttle.slow_disk(five_nodes, "n2", 4_000_000), throttle.link_rate(five_nodes, "n4", "100mbit"):
        code, found = tested.run(*short)
    assert (code, bad_nodes(found)) == (1, ["n2", "n4"]), found["verdicts"]
    places = {each["node"]: {place for place, _ in each.get("faults", ())} for each in found["verdicts"]}
    assert places["n2"] == {f"disk:{five_nodes.scratch}"}
    assert places["n4"] == {"link:eth0"}
    assert five_nodes.squeue() == []


def test_interrupted_it_cancels_its_jobs_which_say_whose_they_are(cluster: Cluster) -> None:
    tested = TestedNodes(cluster)
    with tested.popen("n1", "n2", "--seconds", "20", "--only", "cpu", stderr=subprocess.PIPE) as process:
        wait_until(lambda: len([each for each in cluster.squeue() if each["state"] == "RUNNING"]) == 2, 30, 0.2)
        (first, second) = cluster.squeue()
        assert {first["name"], second["name"]} == {"slurm-watchdog-test"}
        assert "test-nodes of swd-trainer@" in cluster.job(first["job_id"])["Comment"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert wait_until(lambda: not cluster.squeue(), 15, 0.2), cluster.squeue()


def test_killed_it_leaves_no_job_in_the_queue(cluster: Cluster) -> None:
    tested = TestedNodes(cluster)
    with tested.popen(
        "n1", "n2", "--seconds", "20", "--only", "cpu", "--at-once", "2", stderr=subprocess.DEVNULL
    ) as process:
        assert wait_until(lambda: len(cluster.squeue()) == 2, 30, 0.2)
        process.kill()
    assert wait_until(lambda: not cluster.squeue(), 20, 0.2), cluster.squeue()


def test_a_node_in_use_is_waited_for_and_then_not_tested(cluster: Cluster) -> None:
    tested = TestedNodes(cluster)
    job = cluster.sbatch("#!/bin/sh\nsleep 60\n", "--nodelist=n1")
    cluster.wait_for_job_state(job, "RUNNING")
    code, found = tested.run("n1", "--wait", "3s", "--only", "cpu")
    assert code == 3
    assert "not free within 3 s" in found["verdicts"][0]["unsure"][0]
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert wait_until(lambda: [each["job_id"] for each in cluster.squeue()] == [job], 15, 0.2), cluster.squeue()


def test_a_mount_that_hangs_on_one_node_is_a_result(cluster: Cluster) -> None:
    tested = TestedNodes(cluster)
    began = time.monotonic()
    cluster.freeze("n2")
    try:
        with tested.popen(
            "n1", "n2", "n3", "--only", "mount", "--seconds", "0.2", "--shared", str(cluster.scratch),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            output, errors = process.communicate(timeout=90)
    finally:
        cluster.thaw("n2")
    assert process.returncode == 1, (output, errors)
    assert output.startswith("n2 is bad, of 3 nodes tested"), output
    assert "no end within" in output
    assert time.monotonic() - began < 60


def test_a_node_that_we_drained_is_tested_in_a_reservation_and_drained_again(cluster: Cluster) -> None:
    tested = TestedNodes(cluster)
    reason = "slurm-watchdog: Xid 79 of job 7"
    cluster.slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", f"Reason={reason}")
    cluster.slurm("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=fan")
    code, found = tested.run("--drained-by-us", "--only", "disk", "--seconds", "0.2", user=None)
    assert code == 3, found  # a single node: nothing to compare it with
    assert [each["name"] for each in found["nodes"]] == ["n2"]
    assert found["nodes"][0]["like"], found
    node = cluster.node("n2")
    assert "DRAIN" in node["State"]
    assert node["Reason"].startswith(reason)
    assert cluster.node("n3")["Reason"].startswith("fan")
    assert "No reservations" in cluster.slurm("scontrol", "show", "reservation").stdout


def test_an_ordinary_user_lifts_no_drain(cluster: Cluster) -> None:
    tested = TestedNodes(cluster)
    cluster.slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=slurm-watchdog: Xid 79")
    with tested.popen("--drained-by-us", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "Nothing was tested: " in errors
    assert "DRAIN" in cluster.node("n2")["State"]
