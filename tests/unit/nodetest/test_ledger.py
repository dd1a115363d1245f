"""What the controller is told of a test: an event a node and part, none of a node that was not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.cli.test_nodes_ledger import events_of, tell_controller
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.conduct import Report
from slurm_watchdog.nodetest.judge import Verdict
from slurm_watchdog.nodetest.results import Fault
from tests.builders.cli import FakeController

BAD = Verdict(
    node="n1", truth=Truth.BAD,
    faults=(
        Fault(place="link:eth0", what="to n2: slow"), Fault(place="cpu", what="half"), Fault(place="link:eth0", what="to n3: slow"),
    ),
)  # fmt: skip
REPORT = Report(
    began_at=1.0, ended_at=2.0,
    verdicts=(Verdict(node="n2", truth=Truth.OK, peers=4), BAD, Verdict(node="n3", truth=Truth.UNKNOWN, unsure=("busy",))),
)  # fmt: skip


def test_one_event_for_each_part_that_is_bad() -> None:
    found = [(each.kind, each.place, each.what) for each in events_of(BAD, "run")]
    assert found == [("test_failed", "link:eth0", "to n2: slow; to n3: slow"), ("test_failed", "cpu", "half")]


def test_a_controller_is_told_of_bad_and_good_nodes_by_one_id_and_where_none_runs_nobody_is(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"controller: {{socket: {tmp_path}/c.sock}}\n")
    assert tell_controller(REPORT, str(config)) == 0
    controller = FakeController(tmp_path / "c.sock")
    controller.answer = lambda method, target, body: (200, {})
    try:
        assert tell_controller(REPORT, str(config)) == 3
    finally:
        controller.close()
    *events, (_, picture, shown) = controller.requests
    assert (picture, [each["name"] for each in shown["nodes"]]) == ("/v1/node-tests", ["n1", "n3", "n2"])
    assert [(method, target, body["kind"]) for method, target, body in events] == [
        ("POST", "/v1/nodes/n1/events", "test_failed"), ("POST", "/v1/nodes/n1/events", "test_failed"),
        ("POST", "/v1/nodes/n2/events", "test_passed"),
    ]  # fmt: skip
    assert len({body["id"] for _, _, body in events}) == 1


def test_a_controller_that_takes_no_picture_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"controller: {{socket: {tmp_path}/c.sock}}\n")
    controller = FakeController(tmp_path / "c.sock")
    controller.answer = lambda method, target, body: (403 if target == "/v1/node-tests" else 200, {"error": "no"})
    try:
        assert tell_controller(REPORT, str(config)) == 3
    finally:
        controller.close()
    assert capsys.readouterr().err == ""
