"""A node that fails again and again, on a real Slurm: drained by a controller that is killed, and returned by the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.node_events import NodeEvent
from tests.rig.cluster import Cluster
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
