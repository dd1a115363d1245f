"""Suspect nodes: drained once, never beyond the budget or against somebody else, and given back with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.node_history.quarantine import objection_of_events, objection_to_draining, sweep
from slurm_watchdog.controller.node_history.suspicion import event_of
from slurm_watchdog.model.node_events import TESTED_MARK, NodeEventKind, NodeEventRequest
from slurm_watchdog.model.slurm import Reservation, SlurmNode
from tests.behaviour.cluster import EPOCH
from tests.builders.node_past import event
from tests.builders.quarantined import OURS, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    found.journal.close()


def test_a_suspect_node_is_drained_with_our_reason_and_returned_when_its_test_passes(cluster: Cluster) -> None:
    cluster.sweep()
    assert cluster.done == ["drain n1"] and cluster.slurm.nodes["n1"].reason == OURS
    cluster.sweep()
    cluster.says("test_failed", "t1")
    cluster.sweep()
    assert cluster.done == ["drain n1"], "it failed: it is kept"
    cluster.says("test_passed", "t2")
    cluster.sweep(())
    assert cluster.told()[-1].endswith("our drain expired and was unchanged: test_passed t2")
    assert cluster.done == ["drain n1", "undrain n1"]
    said = [each.what for each in cluster.journal.node_events.of(node=["n1"]) if each.kind == NodeEventKind.MENDED]
    assert said == ["returned after a test: test_passed t2"]


def test_a_node_is_not_given_back_for_a_test_that_a_user_says_has_passed(cluster: Cluster) -> None:
    """Anybody who could use the socket had every node in quarantine back, and its past settled."""
    cluster.sweep()
    for is_operator in (False, True):
        cluster.now += 1.0
        said = NodeEventRequest(kind="test_passed", id=f"t{is_operator}", what="all is well")
        found = event_of("n1", said, EPOCH + cluster.now, "ann", is_operator=is_operator)
        cluster.journal.node_events.save(found)
        cluster.sweep(())
        assert cluster.done == (["drain n1", "undrain n1"] if is_operator else ["drain n1"])


def test_one_part_of_a_test_that_failed_keeps_the_node_whatever_else_passed(cluster: Cluster) -> None:
    cluster.sweep()
    cluster.says("test_failed", "t1", "memory")
    cluster.says("test_passed", "t1", "cpu")
    cluster.sweep()
    assert cluster.done == ["drain n1"]


def test_a_node_that_was_returned_is_drained_again_only_for_something_new(cluster: Cluster) -> None:
    cluster.sweep()
    cluster.says("mended", "m1")
    cluster.sweep()
    cluster.sweep()
    assert cluster.done == ["drain n1", "undrain n1"]
    cluster.says("gpu_fault", "f2")
    cluster.sweep()
    assert cluster.done == ["drain n1", "undrain n1", "drain n1"]


def test_without_permission_nothing_is_drained_and_what_is_out_is_looked_after(cluster: Cluster) -> None:
    cluster.sweep(drains=False)
    assert cluster.done == []
    cluster.sweep()
    cluster.says("mended", "m1")
    cluster.sweep(drains=False)
    assert cluster.done == ["drain n1", "undrain n1"]


def test_a_node_with_another_reason_is_left_to_whoever_wrote_it(cluster: Cluster) -> None:
    cluster.sweep()
    cluster.slurm.nodes["n1"] = replace(cluster.slurm.nodes["n1"], reason="ann looks at it")
    cluster.says("test_passed")
    cluster.sweep()
    assert cluster.state == "left" and "undrain n1" not in cluster.done


def test_a_drain_that_a_test_lifts_for_its_reservation_and_puts_back_is_still_ours(cluster: Cluster) -> None:
    cluster.sweep()
    drained = cluster.slurm.nodes["n1"]
    at = EPOCH + cluster.now
    test = Reservation(name=f"{TESTED_MARK}1", start_at=at, end_at=9e9, nodes=("n1", "n2"), flags=("MAINT",))
    cluster.slurm.reservations[test.name] = test
    for state in ("IDLE", "IDLE+MAINT+RESERVED"):  # Slurm shows the reservation some seconds after it was made
        cluster.slurm.nodes["n1"] = replace(drained, state=state, reason="", reason_at=None)
        cluster.sweep()
        assert cluster.state == "drained:"
    cluster.slurm.nodes["n1"] = replace(drained, reason_at=500.0)
    cluster.slurm.reservations.clear()
    cluster.says("test_passed")
    cluster.sweep()
    assert cluster.done == ["drain n1", "undrain n1"]


def test_a_test_that_ends_between_the_questions_for_the_node_and_for_reservations_has_drained_it_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.sweep()
    drained = cluster.slurm.nodes["n1"]
    cluster.slurm.nodes["n1"] = replace(drained, state="IDLE", reason="", reason_at=None)

    async def none_left() -> tuple[Reservation, ...]:
        cluster.slurm.nodes["n1"] = replace(drained, reason_at=500.0)
        return ()

    monkeypatch.setattr(cluster.slurm, "read_reservations", none_left)
    cluster.sweep()
    assert cluster.state == "drained:" and cluster.done == ["drain n1"]


def test_a_node_that_somebody_gave_back_without_a_test_is_left_to_him(cluster: Cluster) -> None:
    cluster.sweep()
    cluster.slurm.nodes["n1"] = replace(cluster.slurm.nodes["n1"], state="IDLE", reason="", reason_at=None)
    cluster.sweep()
    cluster.sweep()
    assert cluster.state == "left" and cluster.done == ["drain n1"]


@pytest.mark.parametrize("fate", ["done", "not done"])
def test_an_answer_of_slurm_that_was_lost_is_looked_for_and_the_node_drained_once(cluster: Cluster, fate: str) -> None:
    cluster.slurm.loses["drain"] = [fate]
    cluster.sweep()
    cluster.sweep()
    assert cluster.done == ["drain n1"] and cluster.state == "drained:"


def test_wherever_the_controller_dies_the_node_is_taken_once_and_returned_once(tmp_path: Path) -> None:
    """Before and after every event of the node and every request to Slurm, until one is not reached."""
    for point in range(1, 100):
        (tmp_path / str(point)).mkdir()
        cluster = Cluster(tmp_path / str(point))
        cluster.dies_at = point
        for _ in range(3):
            cluster.sweep()
        assert cluster.done == ["drain n1"] and cluster.state == "drained:"
        cluster.says("test_passed")
        for _ in range(3):
            cluster.sweep(())
        assert cluster.done == ["drain n1", "undrain n1"]
        assert cluster.told()[0] == f"drained: {OURS}" and cluster.told()[-1].endswith("test_passed t1")
        assert [what for what in cluster.told() if what.startswith("returned")] in (
            ["returned after a test: test_passed t1"],
            [],
        )
        cluster.journal.close()
        if cluster.dies_at != -1:
            break
    assert point == 11


def test_a_node_that_a_person_drains_before_we_do_is_his(cluster: Cluster) -> None:
    listing = cluster.slurm.nodes["n1"]
    cluster.slurm.nodes["n1"] = replace(listing, state="IDLE+DRAIN", reason="ann", reason_at=1.0)
    asyncio.run(
        sweep(cluster._tools(), (("n1", "i1"),), (listing, *list(cluster.slurm.nodes.values())[1:]), drains=True)
    )
    assert cluster.done == [] and cluster.state == ""


def test_a_drain_of_ours_that_no_event_tells_of_is_looked_after(cluster: Cluster) -> None:
    """As an older release, or a controller that died, has left it."""
    ours = replace(cluster.slurm.nodes["n1"], state="IDLE+DRAIN", reason=OURS, reason_at=EPOCH)
    cluster.slurm.nodes["n1"] = ours
    cluster.sweep(())
    cluster.says("test_passed")
    cluster.sweep(())
    assert cluster.done == ["undrain n1"]
    cluster.slurm.nodes["n1"] = replace(ours, reason=f"{OURS}, ann: wait for the new card")
    for _ in range(3):
        cluster.sweep(())
    assert cluster.done == ["undrain n1"], "a person has changed the reason"


@pytest.mark.parametrize(
    ("kinds", "suffices"),
    [
        ("collective_hang@1000 dead_rank@1000 restart_helped@1000", False),
        ("collective_hang@1000 dead_rank@1001", True),
        ("collective_hang@1000 gpu_fault@1000", True),
        ("collective_hang@1000 test_failed@", True),
        ("collective_hang@1000 test_passed@", False),
        ("collective_hang@1000 slowed_job@1000", False),
    ],
    ids=["one user's programs", "two users", "the hardware", "an operator's test", "a test that passed", "his log"],
)
def test_one_user_s_programs_alone_drain_no_node(kinds: str, suffices: bool) -> None:
    pairs = [each.split("@") for each in kinds.split()]
    events = [event(n, kind=kind, chain=f"{uid}/train{n}" if uid else "") for n, (kind, uid) in enumerate(pairs)]
    assert (objection_of_events(events) is None) == suffices


def nodes(**states: str) -> list[SlurmNode]:
    """By name: a state, and after a comma the partitions."""
    parts = {name: words.split(",") for name, words in states.items()}
    return [SlurmNode(name=n, address="", state=p[0], partitions=tuple(p[1:]), reason="why") for n, p in parts.items()]


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (nodes(n1="IDLE,gpu", n2="IDLE,gpu", n3="IDLE,gpu"), None),
        (nodes(n1="ALLOCATED,gpu", n2="MIXED,gpu"), None),
        (nodes(n2="IDLE,gpu"), "knows no node"),
        (nodes(n1="IDLE+DRAIN,gpu", n2="IDLE,gpu"), "drained already: why"),
        (
            nodes(n1="IDLE,gpu", n2="DOWN,gpu", n3="IDLE,gpu", n4="IDLE,gpu"),
            "out of service already: 1 node; allowed: 1",
        ),
        (nodes(n1="IDLE,gpu,big", n2="IDLE,gpu", n3="IDLE,gpu"), "last node of partition big"),
        (nodes(n1="IDLE,gpu"), "out of service already: 0 nodes; allowed: 0"),
    ],
    ids=[
        "free",
        "in use: it drains when its job ends",
        "unknown",
        "somebody's",
        "the budget",
        "the last one",
        "too few",
    ],
)
def test_objections_to_draining_a_suspect(known: list[SlurmNode], why: str | None) -> None:
    found = objection_to_draining("n1", known, 1, 50)
    assert found is None if why is None else found is not None and why in found


def test_a_drain_whose_answer_was_lost_counts_in_the_budget_although_the_listing_is_older(cluster: Cluster) -> None:
    listing = tuple(cluster.slurm.nodes.values())
    cluster.says_of("n2", "gpu_fault", "f2")
    cluster.slurm.loses["drain"] = ["done"]
    for _ in range(3):
        cluster.now += 60.0
        asyncio.run(sweep(cluster._tools(), (("n1", "i1"), ("n2", "i2")), listing, drains=True))
    assert cluster.done == ["drain n1"]
