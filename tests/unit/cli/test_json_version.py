"""Every document that a command prints for programs has a version, also where `--json` prints a list."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from slurm_watchdog.agent import service
from slurm_watchdog.cli.main import main
from slurm_watchdog.model.report import Report
from tests.builders.cli import FakeController, explanation, incident, run, status

NO_JSON = {"controller", "courier", "run"}
"""Commands that run something, and print no document."""
LINES = {"agent"}
"""Prints its reports, an object a line."""
NEEDS_SLURM = {"test-nodes"}
PAUSED = {"paused": {"reason": "", "by": "ann", "at": 1.0}}
SILENCES: dict[str, Any] = {"id": None, "silences": []}
ANSWERS = {
    ("GET", "/v1/status"): status(),
    ("GET", "/v1/incidents"): [incident()],
    ("GET", "/v1/incidents/7f3a"): explanation(),
    ("GET", "/v1/silences"): SILENCES,
    ("POST", "/v1/pause"): PAUSED,
    ("POST", "/v1/resume"): {"paused": None},
    ("POST", "/v1/restart/cancel"): {"cancelled": True, "job_id": "7"},
    ("GET", "/v1/requests/jobs"): [],
    ("GET", "/v1/nodes"): {"suspect_from": 2.25, "suspects": 0, "known": 0, "nodes": []},
}
ASKED = {
    "diagnose": ["7"],
    "incidents": [],
    "nodes": [],
    "pause": [],
    "report": [],
    "restart": ["7", "--cancel"],
    "resume": [],
    "restart --save-only": ["--all", "--dry-run"],
    "show": ["7f3a"],
    "silence": [],
    "status": [],
}
"""Commands that ask the controller; `diagnose` and `report` are refused here."""
ALONE = {
    "doctor": ["{}/train.sbatch"],
    "doctor --config": ["{}/config.yaml"],
    "doctor --notify": ["--config", "{}/config.yaml"],
    "group-stacks": ["{}/stacks.txt"],
    "replay": ["{}/empty.rec"],
    "scan-log": ["{}/train.log"],
    "scan-log --kernel": ["{}/train.log"],
}
LISTS = {"incidents"}
"""It prints a list for `--json`, as in the first release."""


def leaves(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name} ")
        else:
            yield above + name, command


OPTIONS = {name: {option for each in command.params for option in each.opts} for name, command in leaves(main)}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    fake = FakeController(tmp_path / "c.sock")
    fake.answer = lambda method, target, body: (
        (200, ANSWERS[method, target]) if (method, target) in ANSWERS else (404, {"error": "not here"})
    )
    yield fake
    fake.close()


def files(directory: Path) -> Path:
    """A new directory with what the commands read."""
    directory.mkdir()
    for name, text in (
        ("config.yaml", "mode: observe\n"),
        ("train.sbatch", "#!/bin/bash\n#SBATCH -N2\nsrun python train.py\n"),
        ("stacks.txt", 'Process 4711: python train.py\nThread 4711 (idle): "MainThread"\n    wait (a.py:1)\n'),
        ("empty.rec", ""),
        ("train.log", "step 1\nstep 2\n"),
    ):
        (directory / name).write_text(text)
    return directory


def test_every_command_with_json_can_be_asked_for_an_object() -> None:
    assert {name for name, options in OPTIONS.items() if "--json" not in options} == NO_JSON
    assert {name for name, options in OPTIONS.items() if "--json-object" not in options} == NO_JSON | LINES


def test_every_command_with_json_is_tried_here() -> None:
    tried = {name.partition(" ")[0] for name in (*ALONE, *ASKED)}
    assert tried == set(OPTIONS) - NO_JSON - LINES - NEEDS_SLURM


@pytest.mark.parametrize("command", ASKED)
def test_what_the_controller_answers_is_an_object_with_a_version(command: str, controller: FakeController) -> None:
    plain = run(*command.split(), *ASKED[command], "--json", socket=controller.path)
    whole = run(*command.split(), *ASKED[command], "--json-object", socket=controller.path)
    check(command, plain.stdout, whole.stdout)
    assert plain.exit_code == whole.exit_code


@pytest.mark.parametrize("command", ALONE)
def test_what_a_command_finds_by_itself_is_an_object_with_a_version(command: str, tmp_path: Path) -> None:
    printed = []
    for option in ("--json", "--json-object"):
        place = files(tmp_path / option)
        printed.append(run(*command.split(), *(each.format(place) for each in ALONE[command]), option).stdout)
    check(command, *printed)


def check(command: str, plain: str, whole: str) -> None:
    document, as_before = json.loads(whole), json.loads(plain)
    assert document["schema_version"] == 1 and next(iter(document)) == "schema_version"
    assert isinstance(as_before, list) == (command in LISTS)
    if command in LISTS:
        assert list(document) == ["schema_version", "items"]
        assert [set(each) for each in document["items"]] == [set(each) for each in as_before]
    else:
        assert set(document) == set(as_before)


def test_a_failure_is_an_object_with_a_version(tmp_path: Path) -> None:
    result = run("incidents", "--json-object", socket=tmp_path / "none.sock")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["schema_version"], set(document)) == (3, 1, {"schema_version", "error", "next"})


@pytest.mark.parametrize("command", sorted(set(OPTIONS) - NO_JSON))
@pytest.mark.parametrize("option", ["--json", "--json-object"])
def test_wrong_usage_is_an_object_with_a_version(command: str, option: str) -> None:
    result = run(*command.split(), "--no-such-option", option)
    document = json.loads(result.stdout)
    assert (result.exit_code, list(document)) == (2, ["schema_version", "error", "next"])
    assert "--no-such-option" in document["error"] and document["next"].endswith(f"{command} --help")
    assert "--no-such-option" in result.stderr, "people read it, too"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("stauts", "--json"), "stauts"),
        (("show", "--json"), "INCIDENT|JOB|NODE"),
        (("show", " ", "--json"), "id is empty"),
        (("report", "--week", "--from", "2026-01-01", "--json"), "exclude each other"),
        (("report", "--json", "--from", "yesterday"), "'yesterday' is not a date"),
        (("status", "--json", "--config", "/nowhere/config.yaml"), "/nowhere/config.yaml"),
        (("scan-log", "--at", "noon", "/dev/null", "--json"), "noon"),
        (("run", "--no-such-option", "--json", "true"), None),
        (("show", "--", "--json", "7f3a"), None),
        (("stauts",), None),
    ],
)
def test_wrong_usage_of_any_kind_is_a_document_where_json_was_asked_for(
    words: tuple[str, ...], error: str | None
) -> None:
    result = run(*words)
    assert (result.exit_code, bool(result.stderr)) == (2, True)
    assert result.stdout == "" if error is None else error in json.loads(result.stdout)["error"]


def test_a_report_of_the_agent_has_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    for pretty in (True, False):
        service._print_json(Report(node="n1", boot_id="b", agent_id="a", sequence=1), pretty=pretty)
        printed = json.loads(capsys.readouterr().out)
        assert printed == {"schema_version": 1, "node": "n1", "boot_id": "b", "agent_id": "a", "sequence": 1}


def test_no_command_prints_a_document_past_the_version(checkout: Path) -> None:
    found = []
    for path in (checkout / "watchdog/slurm_watchdog/cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.echo":
                words = ast.unparse(node)
                if "json.dumps" in words and "json.dumps(versioned(" not in words:
                    found.append(f"{path.name}: {words}")
    assert found == []
