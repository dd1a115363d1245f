"""The controller tests nodes in quarantine by itself: once, when they are free, and by the result they are given back or
kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.node_history.node_tests import PATIENCE_S, not_covered, peers_for
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import TESTED_MARK, NodeEventKind
from slurm_watchdog.model.slurm import Reservation, SlurmNode
from slurm_watchdog.nodetest.conduct import LIMIT_S
from slurm_watchdog.nodetest.judge import NodeVerdict
from tests.behaviour.cluster import EPOCH
from tests.builders.node_past import event
from tests.builders.quarantined import OURS, Cluster

DAY_S = 86400.0


def cluster_with_tests(directory: Path) -> Cluster:
    """Its three other nodes are idle: fewer than a comparison takes, and the site has floors."""
    found = Cluster(directory)
    found.policy = replace(found.policy, quarantine_test=True)
    found.permitted = found.floors = True
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = cluster_with_tests(tmp_path)
    yield found
    found.journal.close()


def bad(node: str) -> NodeVerdict:
    return NodeVerdict(node=node, truth=Truth.BAD, faults=(("memory", "memory bandwidth is 40 GB/s, its peers 200"),))


def test_a_node_in_quarantine_is_tested_beside_idle_peers_and_returned_with_its_figures(cluster: Cluster) -> None:
    cluster.tester.says = lambda node: NodeVerdict(node=node, truth=Truth.OK, peers=3, figures="memory 200 GB/s")
    cluster.sweep()
    assert cluster.tester.asked == [("n1", "n2", "n3", "n4")]
    cluster.sweep(())
    assert cluster.done == ["drain n1", "undrain n1"] and cluster.slurm.reservations == {}
    assert cluster.told()[-1].endswith("test by slurm-watchdog: well, beside 3 peers: memory 200 GB/s")


def test_a_node_that_fails_is_kept_with_the_figures_and_tested_again_only_after_a_day(cluster: Cluster) -> None:
    cluster.tester.says = lambda node: bad(node) if node == "n1" else NodeVerdict(node=node, truth=Truth.OK)
    for _ in range(4):
        cluster.sweep()
    assert len(cluster.tester.asked) == 1 and cluster.done == ["drain n1"]
    said = [each for each in cluster.journal.node_events.of(node=["n1"]) if each.kind == NodeEventKind.TEST_FAILED]
    assert [(each.place, each.what[-41:]) for each in said] == [
        ("memory", "memory bandwidth is 40 GB/s, its peers 200"[-41:])
    ]
    cluster.now += DAY_S
    cluster.sweep()
    assert len(cluster.tester.asked) == 2


@pytest.mark.parametrize(
    "result", [None, NodeVerdict(node="n1", truth=Truth.UNKNOWN, unsure=("it did not end in time",))]
)
def test_a_test_without_a_result_keeps_the_node_and_costs_one_job(cluster: Cluster, result: NodeVerdict | None) -> None:
    cluster.tester.says = lambda node: result if node == "n1" else None
    for _ in range(4):
        cluster.sweep()
    assert len(cluster.tester.asked) == 1 and cluster.done == ["drain n1"]
    (said,) = (each for each in cluster.journal.node_events.of(node=["n1"]) if each.kind == NodeEventKind.TESTED)
    assert "not judged: " in said.what


@pytest.mark.parametrize("why", ["in use", "paused", "not wanted", "another reason"])
def test_nothing_is_tested_that_must_not_be(cluster: Cluster, why: str) -> None:
    if why == "paused":
        cluster.held_back = "actions are paused"
    if why == "not wanted":
        cluster.permitted = False
    if why in ("in use", "another reason"):
        cluster.permitted = False
        cluster.sweep()
        cluster.permitted = True
        changed = {"state": "MIXED+DRAIN"} if why == "in use" else {"reason": "ann looks at it"}
        cluster.slurm.nodes["n1"] = replace(cluster.slurm.nodes["n1"], **changed)
    for _ in range(3):
        cluster.sweep()
    assert cluster.tester.asked == []


def test_what_a_test_does_not_measure_it_does_not_acquit(cluster: Cluster) -> None:
    cluster.says_of("n1", "gpu_fault", "f2", "GPU-a")
    events = cluster.journal.node_events.of(node=["n1"])
    cluster.journal.node_events.save(replace(events[-1], place="GPU-a"))
    cluster.tester.says = lambda node: NodeVerdict(node=node, truth=Truth.OK, peers=3, measured=("cpu", "memory"))
    for _ in range(3):
        cluster.sweep()
    assert cluster.done == ["drain n1"] and len(cluster.tester.asked) == 1
    (said,) = (each for each in cluster.journal.node_events.of(node=["n1"]) if each.kind == NodeEventKind.TESTED)
    assert said.what.endswith("not measured: GPU-a")


def test_wherever_the_controller_dies_it_is_tested_once_at_a_time_and_returned_once(tmp_path: Path) -> None:
    """Before and after every event, every request to Slurm and every step of the test, until one is not reached."""
    for point in range(1, 100):
        (tmp_path / str(point)).mkdir()
        cluster = cluster_with_tests(tmp_path / str(point))
        cluster.dies_at = point
        for _ in range(3):
            cluster.sweep()
        if cluster.slurm.nodes["n1"].state != "IDLE":
            assert len(cluster.tester.asked) <= 1, "tested again before the first test is known to be over"
            cluster.now += LIMIT_S
            for _ in range(2):
                cluster.sweep()  # what the test has left is put back
            assert cluster.slurm.nodes["n1"].reason in (OURS, "")
            assert len(cluster.tester.asked) <= 2
            cluster.now += DAY_S
            for _ in range(3):
                cluster.sweep(())
        assert 1 <= len(cluster.tester.asked) <= 2 and cluster.slurm.reservations == {} and cluster.tester.jobs == []
        assert cluster.done.count("undrain n1") == 1 and cluster.slurm.nodes["n1"].state == "IDLE"
        assert "test by slurm-watchdog: well" in cluster.told()[-1]
        cluster.journal.close()
        if cluster.dies_at != -1:
            break
    assert point > 15


def test_a_second_controller_waits_until_the_first_one_s_test_is_over_by_its_time(cluster: Cluster) -> None:
    cluster.permitted = False
    cluster.sweep()
    cluster.permitted = True
    name = f"{TESTED_MARK}1"
    cluster.slurm.reservations[name] = Reservation(
        name=name, start_at=EPOCH + cluster.now, end_at=9e9, nodes=("n1", "n2"), flags=("MAINT",)
    )
    for _ in range(10):
        cluster.sweep()
    assert cluster.tester.asked == [] and list(cluster.slurm.reservations) == [name]


def test_what_a_person_s_test_that_was_killed_has_lifted_is_drained_again_after_its_time(cluster: Cluster) -> None:
    name = f"{TESTED_MARK}1"
    cluster.slurm.reservations[name] = Reservation(
        name=name, start_at=EPOCH + cluster.now, end_at=9e9, nodes=("n3", "n4"), flags=("MAINT",)
    )
    cluster.sweep((), drains=False)
    assert cluster.done == []
    cluster.now += LIMIT_S
    cluster.sweep((), drains=False)
    assert cluster.done == ["drain n4"] and cluster.slurm.reservations == {}


def test_without_floors_a_test_waits_for_four_idle_peers_and_not_longer_than_hours(cluster: Cluster) -> None:
    cluster.floors = False
    cluster.sweep()
    assert cluster.tester.asked == []
    cluster.now += PATIENCE_S
    cluster.sweep()
    assert len(cluster.tester.asked) == 1


@pytest.mark.parametrize(
    ("place", "measured", "left"),
    [
        ("", ("cpu",), ()),
        ("GPU-a", ("cpu", "memory"), ("GPU-a",)),
        ("GPU-a", ("gpu",), ()),
        ("GPU-a", ("GPU-b",), ("GPU-a",)),
        ("mount:/scratch", ("mount:/home",), ("mount:/scratch",)),
        ("mount:/scratch", ("mount:/scratch",), ()),
        ("link:eth0", ("cpu",), ("link:eth0",)),
        ("link:mlx5_0", ("link:eth0",), ()),
        ("memory", ("cpu",), ("memory",)),
    ],
)
def test_not_covered(place: str, measured: tuple[str, ...], left: tuple[str, ...]) -> None:
    events = [replace(event(1, kind="gpu_fault"), place=place)]
    assert not_covered(NodeVerdict(node="n1", truth=Truth.OK, measured=measured), events) == left


def test_peers_are_idle_nodes_of_the_same_partitions() -> None:
    states = {
        "n1": "IDLE+DRAIN", "n2": "IDLE", "n3": "MIXED", "n4": "IDLE", "n5": "IDLE", "n6": "IDLE",
        "n7": "IDLE+RESERVED", "n8": "IDLE+PLANNED", "n9": "IDLE+POWERED_DOWN", "n10": "IDLE+MAINT",
    }  # fmt: skip
    known = [
        SlurmNode(name=name, address=name, state=state, partitions=("cpu",) if name == "n4" else ("gpu",))
        for name, state in states.items()
    ]
    assert peers_for(known[0], known, ("n6",)) == ["n2", "n5"]
