"""`drain` and `undrain`: one request a node, what became of each, and an exit code that a script can trust."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.cli import FakeController, run

REASON = "slurm-watchdog: ann: fan is loud"


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    fake = FakeController(tmp_path / "c.sock")
    for node in ("n1", "n2", "n3"):
        for wish in ("drain", "undrain"):
            answer = {"node": node, "drained": wish == "drain", "reason": REASON, "by": "ann"}
            fake.answers["POST", f"/v1/nodes/{node}/{wish}"] = answer
    yield fake
    fake.close()


def test_drain_asks_for_each_node_of_a_set(controller: FakeController) -> None:
    result = run("drain", "n[1-2]", "n3", "--reason", "fan is loud", socket=controller.path)
    assert result.exit_code == 0
    assert result.output.splitlines() == [f"{node} is drained: {REASON}" for node in ("n1", "n2", "n3")]
    assert [target for _, target, _ in controller.requests] == [
        f"/v1/nodes/{node}/drain" for node in ("n1", "n2", "n3")
    ]
    assert controller.requests[0][2] == {"reason": "fan is loud", "force": False}


def test_undrain_says_what_the_reason_was(controller: FakeController) -> None:
    result = run("undrain", "n1", socket=controller.path)
    assert (result.exit_code, result.output) == (0, f"n1 is given back (it was drained: {REASON})\n")


def test_a_node_that_is_refused_keeps_no_other_from_being_drained(controller: FakeController) -> None:
    why = "out of service already: 2 nodes; allowed: 2"
    controller.answers["POST", "/v1/nodes/n2/drain"] = (409, {"error": why})
    result = run("drain", "n[1-3]", "--reason", "x", "--force", socket=controller.path)
    assert result.exit_code == 1
    assert result.stderr == f"n2: {why}\n"
    assert result.stdout.splitlines() == [f"{node} is drained: {REASON}" for node in ("n1", "n3")]
    assert controller.requests[0][2]["force"] is True


def test_drain_json_has_an_answer_for_each_node(controller: FakeController) -> None:
    controller.answers["POST", "/v1/nodes/n2/drain"] = (503, {"error": "Slurm: no answer"})
    result = run("drain", "n[1-2]", "--reason", "x", "--json", socket=controller.path)
    document = json.loads(result.stdout)
    assert result.exit_code == 3 and document["schema_version"]
    assert [each.get("error", each.get("drained")) for each in document["nodes"]] == [True, "Slurm: no answer"]


def test_without_a_controller_no_other_node_is_asked_for(tmp_path: Path) -> None:
    result = run("drain", "n[1-2]", "--reason", "x", socket=tmp_path / "none.sock")
    assert result.exit_code == 3
    assert "does not exist" in result.stderr and "n2:" not in result.stderr


@pytest.mark.parametrize("words", [("drain", "n1"), ("drain", "--reason", "x"), ("undrain",), ("undrain", "n[1-")])
def test_wrong_usage_asks_for_nothing(controller: FakeController, words: tuple[str, ...]) -> None:
    assert run(*words, socket=controller.path).exit_code == 2
    assert controller.requests == []
