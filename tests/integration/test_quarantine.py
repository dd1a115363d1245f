"""A node that fails again and again, on a real Slurm: drained by a controller that is killed, and returned by the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.node_events import NodeEvent
from tests.rig.cluster import Cluster
from tests.rig.commands import wait_until
from tests.rig.stack import Watchdog

Watch = Callable[..., Watchdog]
DAY_S = 86400.0
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


def program(cluster: Cluster, is_well: str) -> str:
    """A node test of the site's own: one figure, and a fault unless `is_well`."""
    file = cluster.shared / "own_test.py"
    file.write_text(
        "import json, os, time\n"
        "line = {'node': os.environ['SLURMD_NODENAME'], 'state': 'ok'}\n"
        "print(json.dumps({**line, 'part': 'fan', 'state': 'begun'}), flush=True)\n"
        "figure = {'name': 'disk_write', 'value': 9.0, 'unit': 'MB/s', 'column': 'disk write', 'place': 'GPU-a'}\n"
        f"faults = [] if {is_well} else [{{'what': 'the fan is loud', 'place': 'fan'}}]\n"
        "print(json.dumps({**line, 'part': 'fan', 'figures': [figure], 'faults': faults}))\n"
        "print(json.dumps({**line, 'part': 'end'}))\n"
    )
    file.chmod(0o644)
    return str(file)


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
@pytest.mark.timeout(600)
def test_a_node_in_quarantine_is_tested_by_the_controller_kept_with_the_figures_and_returned_once_it_is_mended(
    cluster: Cluster, watch: Watch
) -> None:
    """A program of the site's own finds the node broken until it is repaired; its figures have floors in the place of
    peers."""
    mended = cluster.shared / "mended"
    tests = {"program": program(cluster, f"os.path.exists({str(mended)!r})"), "floors": {"disk_write": 0.001}}
    wanted = {"quarantine_test": True, "quarantine_test_again": "1s"}
    watchdog = watch(mode="act", settings={"policy": QUARANTINE["policy"] | wanted, "node_tests": tests})
    happened(watchdog, *(fault(days) for days in (1, 5, 9)))
    cluster.wait_for_node_state("n2", "IDLE+DRAIN", 60)
    reason = cluster.node("n2")["Reason"]
    job = cluster.sbatch("#!/bin/sh\ntrue\n", "--nodelist=n2")

    def history() -> str:
        return watchdog.command("nodes", "n2").stdout

    assert wait_until(lambda: "test by slurm-watchdog: the fan is loud" in history(), 180, 2.0), watchdog.log_tail(
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
def test_a_controller_that_is_killed_in_the_middle_of_a_test_leaves_the_node_reserved_and_no_job(
    cluster: Cluster, watch: Watch
) -> None:
    """Its job ends with it, and nothing else can start on the node, which the next controller drains once that test must
    be over (tests/unit/controller/test_node_tests.py)."""
    wanted = {"quarantine_test": True}
    tests = {"program": program(cluster, "time.sleep(40)"), "floors": {"disk_write": 0.001}}
    watchdog = watch(mode="act", settings={"policy": QUARANTINE["policy"] | wanted, "node_tests": tests})
    happened(watchdog, *(fault(days) for days in (1, 5, 9)))
    cluster.wait_for_node_state("n2", "IDLE+DRAIN", 60)

    def asks(*words: str) -> str:
        return cluster.slurm(*words).stdout

    assert wait_until(lambda: "slurm-watchdog-test" in asks("squeue", "--states=R", "--format=%j"), 120, 0.5)
    assert "DRAIN" not in cluster.node("n2")["State"]
    watchdog.kill_controller()
    assert wait_until(lambda: "slurm-watchdog-test" not in asks("squeue", "--format=%j"), 60, 0.5)
    assert "slurm-watchdog-test-" in asks("scontrol", "show", "reservation"), "no other job starts there"
    job = cluster.sbatch("#!/bin/sh\ntrue\n", "--nodelist=n2")
    watchdog.start_controller()
    time.sleep(5)
    assert cluster.job(job)["JobState"] == "PENDING"
