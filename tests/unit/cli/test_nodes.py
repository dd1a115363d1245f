"""`nodes`: the table and the history, and the same asked of the real socket's handlers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from slurm_watchdog.controller.node_history.suspicion import by_node, event_of, node_history, node_table, suspicions
from slurm_watchdog.controller.policy.access import Operators, Person
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind, NodeEventRequest
from tests.builders.cli import FakeController, run
from tests.builders.node_past import GPU, NOW, event

OPERATORS = Operators(frozenset({0}))
ROOT, OWNER, STRANGER = Person(0), Person(1501), Person(1600)
EVENTS = [
    event(1.0, place=GPU, incident_id="i3", chain="1501/train", what="Xid 79 /s/own.py"),
    event(2.0, place=GPU, incident_id="i2"),
    event(3.0, place=GPU, incident_id="i1"),
    event(4.0, kind="dead_rank", withdrawn_why="incident o1 explains it"),
    event(0.5, "n2", "filesystem_stall", place="mount:/secret"),
]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    fake = FakeController(tmp_path / "c.sock")
    yield fake
    fake.close()


def table(sees: bool = True) -> dict[str, Any]:
    return to_builtins(node_table(suspicions(by_node(EVENTS), NOW), sees=sees))


def history(person: Person) -> dict[str, Any]:
    return to_builtins(node_history("n1", by_node(EVENTS)["n1"], NOW, person, OPERATORS))


def test_nodes_lists_the_worst_first_and_ends_with_1_while_one_is_suspect(controller: FakeController) -> None:
    controller.answers["GET", "/v1/nodes"] = table()
    result = run("nodes", socket=controller.path)
    assert result.exit_code == 1
    first, _, row, second = result.output.splitlines()[:4]
    assert first == "2 nodes with events, 1 of them suspect (from 2.25 on)."
    assert row.split()[:3] == ["n1", "2.86", "3"] and GPU in row and second.startswith("n2")


def test_nodes_with_a_node_shows_its_history_with_what_does_not_count(controller: FakeController) -> None:
    controller.answers["GET", "/v1/nodes/n1"] = history(ROOT)
    result = run("nodes", "n1", socket=controller.path)
    assert result.exit_code == 1
    assert result.output.startswith("n1: suspicion 2.86, suspect (from 2.25 on); 3 events that count within 14 days.")
    assert "Xid 79 /s/own.py" in result.output and "(does not count: incident o1 explains it)" in result.output


def test_nodes_mended_tells_the_controller_and_shows_what_is_left(controller: FakeController) -> None:
    controller.answers["POST", "/v1/nodes/n1/events"] = {"node": "n1"}
    controller.answers["GET", "/v1/nodes/n1"] = history(ROOT)
    run("nodes", "n1", "--mended", "GPU 3 exchanged", socket=controller.path)
    _, _, body = controller.requests[0]
    assert (body["kind"], body["what"]) == ("mended", "GPU 3 exchanged")
    assert run("nodes", "--mended", "x", socket=controller.path).exit_code == 2


def test_words_of_a_user_are_for_him_and_for_operators() -> None:
    assert "own.py" in str(history(ROOT)) and "own.py" in str(history(OWNER))
    assert "own.py" not in str(history(STRANGER))
    assert "/secret" in str(table()) and "/secret" not in str(table(sees=False))


def added(is_operator: bool = True, **changes: Any) -> NodeEvent:
    body = {"kind": "test_failed", "id": "t1", "what": "memory 40 of 200 GB/s", "place": "memory"}
    return event_of("n1", NodeEventRequest(**body | changes), NOW, "ann", is_operator=is_operator)


def test_a_failed_test_is_an_event_and_a_user_s_own_is_held_against_nobody() -> None:
    assert added().kind is NodeEventKind.TEST_FAILED
    assert added(is_operator=False).kind is NodeEventKind.USER_TEST_FAILED
    assert added(is_operator=False, kind="test_passed").kind is NodeEventKind.USER_TEST_PASSED
    assert suspicions(by_node([added(is_operator=False)]), NOW) == []
    assert added().what == "memory 40 of 200 GB/s (by ann)"


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "gpu_fault"}, {"id": ""}, {"id": "a b"}, {"place": "../x y"}, {"what": " "},
    ],
)  # fmt: skip
def test_what_cannot_be_an_event_is_refused_with_a_sentence(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has to be|only operators"):
        added(**changes)
