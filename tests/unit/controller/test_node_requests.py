"""Drains that people ask for: who asked stands in Slurm and in the history, the budget holds, and only ours are undone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.model.node_events import NodeEventKind
from slurm_watchdog.model.quarantine import QuarantineState
from slurm_watchdog.slurm.client import Refusal, SlurmRefused
from tests.builders.notices import DECISION
from tests.builders.quarantined import OURS, SUSPECT, Cluster

REASON = "slurm-watchdog: ann: fan is loud"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    found.journal.close()


def test_a_node_is_drained_for_a_person_and_given_back_for_another_one(cluster: Cluster) -> None:
    assert cluster.asks("drain") == REASON
    assert cluster.slurm.nodes["n1"].reason == REASON
    cluster.says("test_passed")
    cluster.sweep()
    assert cluster.done == ["drain n1"], "a test or the time gives no such node back"
    assert cluster.asks("undrain", by="bob") == REASON
    assert cluster.done == ["drain n1", "undrain n1"]
    assert cluster.history() == [
        (NodeEventKind.DRAINED, f"drained: {REASON}"),
        (NodeEventKind.BY_OPERATOR, f"bob had it given back (it was drained: {REASON})"),
    ]
    (entry,) = cluster.all()
    assert (entry.asked_by, entry.state, entry.ended_why) == ("ann", QuarantineState.RETURNED, "given back by bob")


def test_a_drain_for_planned_work_speaks_against_no_node(cluster: Cluster) -> None:
    cluster.asks("drain", reason="new firmware")
    assert [kind for kind, _ in cluster.history()] == [NodeEventKind.BY_OPERATOR]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ('"worn"', 'slurm-watchdog: ann: "worn'),
        ("two\nlines", "slurm-watchdog: ann: two lines"),
        ("login password=hunter2", "slurm-watchdog: ann: login password=(masked)"),
    ],
    ids=["scontrol drops a quote at the end", "one line", "secret"],
)
def test_a_reason_is_sent_as_slurm_gives_it_back(cluster: Cluster, given: str, kept: str) -> None:
    assert cluster.asks("drain", reason=given) == kept
    assert cluster.asks("undrain") == kept


def test_the_budget_counts_what_was_drained_since_slurm_was_listed(cluster: Cluster) -> None:
    cluster.policy = cluster.policy.model_copy(update={"max_drained_nodes": 2})
    assert cluster.asks("drain", "n1").startswith("slurm-watchdog:")
    assert cluster.asks("drain", "n2").startswith("slurm-watchdog:")
    refused = cluster.asks("drain", "n3")
    assert refused.startswith("out of service already: 2 nodes; allowed: 2") and "--force" in refused
    assert cluster.done == ["drain n1", "drain n2"]
    assert cluster.asks("drain", "n3", force=True).startswith("slurm-watchdog:")


def test_the_last_node_of_a_partition_is_drained_with_force_alone(cluster: Cluster) -> None:
    cluster.slurm.add_nodes("n9", partition="big")
    cluster.listing = tuple(cluster.slurm.nodes.values())
    assert cluster.asks("drain", "n9").startswith("n9 is the last node of partition big that starts jobs")
    assert cluster.asks("drain", "n9", force=True) == REASON


def test_a_suspect_is_not_drained_beyond_what_people_have_drained(cluster: Cluster) -> None:
    cluster.asks("drain", "n2")
    cluster.sweep(SUSPECT)
    assert cluster.done == ["drain n2"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"state": "IDLE+DRAIN", "reason": "cable", "reason_user": "eve"}, "n1 is drained already: cable (by eve)"),
        ({"state": "DRAINED", "reason": "x"}, "n1 is drained already: x"),
    ],
)
def test_a_drain_of_somebody_else_keeps_its_reason(
    cluster: Cluster, state: dict[str, Any], words: str, force: bool
) -> None:
    cluster.slurm.nodes["n1"] = replace(cluster.slurm.nodes["n1"], **state)
    assert cluster.asks("drain", force=force).startswith(words)
    assert cluster.done == [] and cluster.all() == []


@pytest.mark.parametrize("wish", ["drain", "undrain"])
def test_nothing_is_done_for_a_person_while_actions_are_paused_or_slurm_is_not_seen(
    cluster: Cluster, wish: Any
) -> None:
    cluster.held_back = "actions are paused (x), until `slurm-watchdog resume`"
    assert cluster.asks(wish) == cluster.held_back
    assert cluster.done == []


def test_a_node_is_drained_again_at_once_after_somebody_has_given_it_back_with_scontrol(cluster: Cluster) -> None:
    cluster.asks("drain")
    cluster.slurm.nodes["n1"] = replace(cluster.slurm.nodes["n1"], state="IDLE", reason="", reason_at=None)
    assert cluster.asks("drain", reason="fan again") == "slurm-watchdog: ann: fan again"
    assert [each.state for each in cluster.all()] == [QuarantineState.LEFT, QuarantineState.DRAINED]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"state": "IDLE"}, "n1 is not drained"),
        ({"state": "IDLE+DRAIN", "reason": "cable", "reason_user": "eve"}, "but of eve (cable)"),
        ({"state": "IDLE+DRAIN", "reason": "Kill task failed"}, "but of somebody else (Kill task failed)"),
        ({"state": "IDLE+DRAIN", "reason": f"{REASON}; eve: do not touch", "reason_user": "eve"}, "but of eve"),
        ({"state": "IDLE+DRAIN", "reason": "slurm-watchdog: typed like ours", "reason_user": "eve"}, "but of eve"),
    ],
    ids=["back", "somebody's", "Slurm's", "changed", "typed"],
)
def test_a_drain_that_is_not_ours_is_never_undone(cluster: Cluster, state: dict[str, Any], words: str) -> None:
    cluster.asks("drain")
    cluster.slurm.nodes["n1"] = replace(cluster.slurm.nodes["n1"], **state)
    assert words in cluster.asks("undrain", by="bob")
    assert cluster.done == ["drain n1"]


def test_a_person_gives_back_what_the_quarantine_or_a_rule_has_drained(cluster: Cluster) -> None:
    cluster.sweep(SUSPECT)
    assert cluster.asks("undrain") == OURS
    ours = "slurm-watchdog: gpu_fault, job 7, incident i1"
    cluster.slurm.nodes["n2"] = replace(cluster.slurm.nodes["n2"], state="MIXED+DRAIN", reason=ours, reason_at=7.0)
    cluster.journal.add_decision(DECISION)
    cluster.journal.node_entry("n2", "drained", DECISION, 7.0, ours, 7.0)
    assert cluster.asks("undrain", "n2") == ours
    assert cluster.done == ["drain n1", "undrain n1", "undrain n2"]
    assert cluster.journal.node_entries("drained") == []


def test_a_node_in_a_reservation_of_the_quarantine_is_said_to_be_in_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "reservation")
    cluster.sweep(SUSPECT)
    assert "kept in reservation slurm-watchdog-suspect-n1" in cluster.asks("drain")
    assert cluster.asks("undrain").startswith("n1 is not drained")
    cluster.journal.close()


def test_a_refusal_of_slurm_ends_the_request_and_nothing_is_tried_later(cluster: Cluster) -> None:
    cluster.slurm.refuses["drain"] = SlurmRefused("Invalid user", Refusal.NO_PERMISSION)
    assert cluster.asks("drain") == "Invalid user"
    del cluster.slurm.refuses["drain"]
    cluster.sweep(())
    (entry,) = cluster.all()
    assert (entry.state, entry.ended_why, cluster.done) == (QuarantineState.LEFT, "not drained: Invalid user", [])


def test_a_controller_that_dies_at_any_step_drains_once_and_never_later(tmp_path: Path) -> None:
    for point in range(1, 40):
        place = tmp_path / str(point)
        place.mkdir()
        cluster = Cluster(place)
        cluster.dies_at = cluster.steps + point
        killed = cluster.asks("drain") == "killed"
        drained = bool(cluster.done)
        cluster.sweep(())
        assert cluster.done == ["drain n1"] * drained, point
        entries = cluster.all()
        expected = QuarantineState.DRAINED if drained else QuarantineState.LEFT
        assert [each.state for each in entries] in ([expected], [] if not drained else [expected]), point
        if drained:
            assert [what for _, what in cluster.history()] == [f"drained: {REASON}"], point
        cluster.journal.close()
        if not killed:
            return
    raise AssertionError("the request has no end")


def test_a_controller_that_dies_while_it_gives_a_node_back_leaves_the_name_of_who_asked(tmp_path: Path) -> None:
    for point in range(1, 40):
        place = tmp_path / str(point)
        place.mkdir()
        cluster = Cluster(place)
        cluster.asks("drain")
        cluster.dies_at = cluster.steps + point
        killed = cluster.asks("undrain", by="bob") == "killed"
        given_back = "undrain n1" in cluster.done
        cluster.sweep(())
        assert cluster.done.count("undrain n1") == given_back, point
        (entry,) = cluster.all()
        assert (entry.ended_at is not None) == given_back, point
        assert not given_back or any(what.startswith("bob ") for _, what in cluster.history()), point
        cluster.journal.close()
        if not killed:
            return
    raise AssertionError("the request has no end")
