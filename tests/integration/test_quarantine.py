"""A node that fails again and again, on a real Slurm: drained by a controller that is killed, and returned by the next."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from slurm_watchdog.controller.actions.node_tester import CommandTester
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import NodeEvent
from slurm_watchdog.model.node_test import NodeTest, Purpose
from tests.rig.cluster import Cluster
from tests.rig.commands import wait_until
from tests.rig.node_tests import TestedNodes
from tests.rig.stack import Watchdog

Watch = Callable[..., Watchdog]
DAY_S = 86400.0
THEIRS = ("ReservationName=theirs", "Nodes=n3", "Users=root", "StartTime=now+2hours", "Duration=10", "Flags=MAINT")
QUARANTINE = {"policy": {"quarantine": True, "max_drained_nodes": 1, "drained_percent": 50}}


def happened(watchdog: Watchdog, *events: NodeEvent) -> None:
    """While no controller lives: as if an earlier one had written it down."""
    watchdog.kill_controller()
    journal = Journal(f"sqlite:///{watchdog.directory}/state/journal.sqlite")
    for event in events:
        journal.node_events.save(event)
    journal.close()
    watchdog.start_controller()


def fault(days_ago: float) -> NodeEvent:
    at = time.time() - days_ago * DAY_S
    return NodeEvent(key=f"fault {days_ago}", node="n2", kind="gpu_fault", at=at, what="Xid 79", place="GPU-a")


def test_a_suspect_node_is_drained_across_kills_and_returned_when_a_test_passes(cluster: Cluster, watch: Watch) -> None:
    watchdog = watch(mode="act", settings=QUARANTINE)
    assert watchdog.command("nodes").returncode == 0
    happened(watchdog, *(fault(days) for days in (1, 5, 9)))
    cluster.wait_for_node_state("n2", "IDLE+DRAIN", 60)
    reason = cluster.node("n2")["Reason"]
    assert reason.startswith("slurm-watchdog: suspect node, incident "), reason
    listed = watchdog.command("nodes")
    assert listed.returncode == 1 and "n2" in listed.stdout and "GPU-a" in listed.stdout
    failed: dict[str, Any] = {"kind": "test_failed", "id": "t1", "place": "memory", "what": "40 GB/s, its peers 200"}
    watchdog.ask("POST", "/v1/nodes/n2/events", failed)
    happened(watchdog)
    assert "DRAIN" in cluster.node("n2")["State"] and cluster.node("n2")["Reason"] == reason
    passed = {"key": "test_passed:root:t2:n2:", "kind": "test_passed", "what": "as fast as its peers"}
    happened(watchdog, NodeEvent(node="n2", at=time.time(), **passed))
    cluster.wait_for_node_state("n2", "IDLE", 60)
    history = watchdog.command("nodes", "n2")
    print(history.stdout)
    assert history.returncode == 0 and "returned after a test: as fast as its peers" in history.stdout
    others = [cluster.node(node)["State"] for node in ("n1", "n3")]
    assert not any("DRAIN" in state for state in others)


@pytest.mark.thorough
def test_a_suspect_node_is_reserved_across_kills_tested_there_and_its_reservation_deleted_when_a_test_passes(
    cluster: Cluster, watch: Watch
) -> None:
    def reserved() -> list[str]:
        return re.findall(r"ReservationName=(\S+)", cluster.slurm("scontrol", "show", "reservation").stdout)

    watchdog = watch(mode="act", settings={"policy": QUARANTINE["policy"] | {"quarantine_by": "reservation"}})
    cluster.slurm("scontrol", "create", "reservation", *THEIRS)
    happened(watchdog, *(fault(days) for days in (1, 5, 9)))
    assert wait_until(lambda: len(reserved()) == 2, 60, 0.5), watchdog.log_tail("controller")
    happened(watchdog)
    (ours,) = (each for each in reserved() if each != "theirs")
    assert ours.startswith("slurm-watchdog-suspect-n2-")
    assert wait_until(lambda: "MAINT" in cluster.node("n2")["State"], 30, 0.5)
    job = cluster.sbatch("#!/bin/sh\ntrue\n", "--nodelist=n2")
    _, found = TestedNodes(cluster).run("--drained-by-us", "--only", "disk", "--seconds", "0.2", user=None)
    assert [each["node"] for each in found["nodes"]] == ["n2"] and found["nodes"][0]["model"], found
    assert ours in reserved() and cluster.job(job)["JobState"] == "PENDING"
    passed = {"key": "test_passed:root:t2:n2:", "kind": "test_passed", "what": "as fast as its peers"}
    happened(watchdog, NodeEvent(node="n2", at=time.time(), **passed))
    assert wait_until(lambda: reserved() == ["theirs"], 60, 0.5), watchdog.log_tail("controller")
    cluster.wait_for_job_state(job, "COMPLETED")
    history = watchdog.command("nodes", "n2").stdout
    print(history)
    assert f"reserved as {ours}" in history and "returned after a test: as fast as its peers" in history


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_node_in_quarantine_is_tested_by_the_controller_kept_with_the_figures_and_returned_once_it_is_mended(
    cluster: Cluster, watch: Watch
) -> None:
    """The site's check fails until the node is mended, and figures have floors in the place of peers."""
    mended = cluster.shared / "mended"
    tests = {
        "check": f"test -e {mended}",
        "parts": ["disk", "site_check"],  # what other tests on the machine do not disturb
        "floors": {"disk_write": 0.001},
        "local_directories": [str(cluster.scratch)],
    }
    wanted = {"quarantine_test": True, "quarantine_test_peers": 0, "quarantine_test_again": "1s"}
    watchdog = watch(mode="act", settings={"policy": QUARANTINE["policy"] | wanted, "node_tests": tests})
    happened(watchdog, *(fault(days) for days in (1, 5, 9)))
    cluster.wait_for_node_state("n2", "IDLE+DRAIN", 60)
    reason = cluster.node("n2")["Reason"]
    job = cluster.sbatch("#!/bin/sh\ntrue\n", "--nodelist=n2")

    def history() -> str:
        return watchdog.command("nodes", "n2").stdout

    assert wait_until(lambda: "test by slurm-watchdog: site_check: " in history(), 180, 2.0), watchdog.log_tail(
        "controller"
    )
    ours = reason.partition(" [")[0]  # the test has lifted the drain and put it back: another time
    assert wait_until(lambda: cluster.node("n2")["Reason"].startswith(ours), 30, 0.5), cluster.node("n2")
    assert cluster.job(job)["JobState"] == "PENDING"
    mended.touch()  # the next test is a second after, at the next round
    assert wait_until(lambda: "test by slurm-watchdog: well" in history(), 240, 2.0), watchdog.log_tail("controller")
    cluster.wait_for_node_state("n2", "IDLE", 90)
    cluster.wait_for_job_state(job, "COMPLETED")
    print(history())
    assert "returned after a test: test by slurm-watchdog: well" in history() and "disk write" in history()
    assert "slurm-watchdog-test" not in cluster.slurm("scontrol", "show", "reservation").stdout
    mended.unlink()


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_idle_suspects_of_a_search_are_tested_by_ordinary_jobs_and_the_bad_one_is_named(cluster: Cluster) -> None:
    """Nothing is drained or reserved; the site's check fails on one of them."""
    config = cluster.shared / "search.yaml"
    tests = {
        "check": 'test "$SLURMD_NODENAME" != n2',
        "parts": ["disk", "site_check"],
        "local_directories": [str(cluster.scratch)],
    }
    config.write_text(json.dumps({"cluster_name": "t", "node_tests": tests | {"floors": {"disk_write": 0.001}}}))
    config.chmod(0o644)
    asked = NodeTest(
        name="slurm-watchdog-test-0a1b", purpose=Purpose.SLOW_SEARCH, about="7", nodes=("n1", "n2"), at=time.time(),
        until=time.time() + 380,
    )  # fmt: skip
    tester = CommandTester(str(config), str(cluster.shared / "state"), cluster.env, checks=True)
    found = {each.node: each for each in asyncio.run(tester.test(asked))}
    print(found)
    assert found["n2"].truth is Truth.BAD and [place for place, _ in found["n2"].faults] == ["site_check"]
    assert found["n1"].truth is not Truth.BAD and "disk write" in found["n1"].figures
    assert "No reservations" in cluster.slurm("scontrol", "show", "reservation").stdout
    assert all("DRAIN" not in cluster.node(node)["State"] for node in ("n1", "n2"))


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_controller_that_is_killed_in_the_middle_of_a_test_leaves_the_node_drained_and_no_job(
    cluster: Cluster, watch: Watch
) -> None:
    wanted = {"quarantine_test": True, "quarantine_test_peers": 0}
    tests = {"check": "sleep 40", "check_limit": "50s", "parts": ["site_check"]}
    watchdog = watch(mode="act", settings={"policy": QUARANTINE["policy"] | wanted, "node_tests": tests})
    happened(watchdog, *(fault(days) for days in (1, 5, 9)))
    cluster.wait_for_node_state("n2", "IDLE+DRAIN", 60)
    ours = cluster.node("n2")["Reason"].partition(" [")[0]

    def asks(*words: str) -> str:
        return cluster.slurm(*words).stdout

    def is_back() -> bool:
        drained = "DRAIN" in cluster.node("n2")["State"] and cluster.node("n2")["Reason"].startswith(ours)
        return drained and "No reservations" in asks("scontrol", "show", "reservation")

    assert wait_until(lambda: "slurm-watchdog-test" in asks("squeue", "--states=R", "--format=%j"), 120, 0.5)
    assert "DRAIN" not in cluster.node("n2")["State"]
    watchdog.kill_controller()
    assert wait_until(is_back, 150, 0.5), (cluster.node("n2")["State"], asks("scontrol", "show", "reservation"))
    assert wait_until(lambda: "slurm-watchdog-test" not in asks("squeue", "--format=%j"), 60, 0.5)
    watchdog.start_controller()
    time.sleep(10)  # a round of the next controller: it waits until the test is over by its time
    assert is_back() and "is tested" not in watchdog.log_tail("controller").rpartition("mode act")[2]
