"""The commands against a small HTTP server on a Unix socket that plays the controller."""

from __future__ import annotations

import json
import re
import socketserver
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from slurm_watchdog import __version__
from slurm_watchdog.cli.client import Client
from slurm_watchdog.cli.main import main, renamed
from slurm_watchdog.cli.options import JSON, Answer, ClientError, command
from slurm_watchdog.cli.restart import parse_date
from slurm_watchdog.model.actions import OperationOutcome
from slurm_watchdog.model.documents import ActionRun, Operation, SelectedJob, Status
from slurm_watchdog.report.story import Row
from tests.builders.cli import (
    HOSTILE,
    FakeController,
    action,
    explanation,
    has,
    incident,
    job,
    operation,
    run,
    status,
)
from tests.builders.time_zone import time_zone

COMMANDS = sorted(main.commands)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    fake = FakeController(tmp_path / "c.sock")
    yield fake
    fake.close()


# ------------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert re.search(rf"Examples?:\n\s+slurm-watchdog {command}", result.output)
    assert f"slurm-watchdog {command}" in result.output


def test_the_list_of_commands_is_the_one_that_scripts_depend_on() -> None:
    assert set(COMMANDS) == {
        "run", "status", "incidents", "show", "diagnose", "restart", "pause", "resume", "silence", "nodes", "test-nodes", "report", "doctor",
        "agent", "controller", "courier", "replay", "scan-log", "group-stacks",
    }  # fmt: skip
    people, services = re.split(r"\nServices and development:\n", run("--help").output)
    shown = re.findall(r"^  ([a-z-]+)  ", people.partition("\nCommands:\n")[2], re.MULTILINE)
    assert (len(shown), re.findall(r"^  ([a-z-]+)  ", services, re.MULTILINE)) == (
        13,
        ["agent", "controller", "replay"],
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("explain 7f3a --json", "show --all 7f3a --json"),
        ("story 4711 --no-accounting", "show --all 4711 --no-accounting"),
        ("attach --listen h:9 4711 --act", "run --job 4711 --listen h:9 --act"),
        ("attach --help", "run --help"),
        ("check-config", "doctor --config /etc/slurm-watchdog/config.yaml"),
        ("check-config --json my.yaml", "doctor --config my.yaml --json"),
        ("notify test --severity critical", "doctor --notify --severity critical"),
        ("save-all --all --dry-run", "restart --save-only --all --dry-run"),
    ],
)
def test_a_command_of_the_release_before_is_todays(old: str, new: str) -> None:
    assert renamed(*old.split()) == new.split()
    assert run(*old.split()).exit_code != 2 or run(*old.split()).output == run(*new.split()).output


def test_an_option_of_the_release_before_names_its_alternative() -> None:
    for words in ("restart 7 --partition gpu", "save-all --all --user ann", "test-nodes --job 7"):
        result = run(*words.split())
        assert (result.exit_code, "was removed; " in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    ["report --html F --week", "test-nodes --interface=ib0 --no-second-look", "run --resume-option x -- no-such"],
)
def test_an_option_that_has_no_effect_any_more_costs_a_warning(words: str) -> None:
    assert " was removed and has no effect; " in run(*words.split()).stderr


def test_the_words_of_a_command_are_its_own() -> None:
    assert "has no effect" not in run("run", "--", "no-such", "--resume-option", "x").stderr


def test_without_headers_only_the_rows_of_tables_are_printed(controller: FakeController) -> None:
    controller.answers["GET", "/v1/incidents"] = [incident()]
    controller.answers["GET", "/v1/status"] = status()
    assert run("incidents", "--noheader", socket=controller.path).stdout.split()[:3] == ["7f3a", "firing", "4711"]
    assert [line[:4] for line in run("status", "--noheader", socket=controller.path).stdout.splitlines()] == ["4711"]


def test_the_version_is_printed() -> None:
    said = run("--version").output.strip()
    assert re.fullmatch(rf"slurm-watchdog {re.escape(__version__)} \(commit [0-9a-f]{{8}}\)", said), said


# ---------------------------------------------------------------------------------------------- status


@pytest.mark.parametrize(
    ("level", "code", "word"),
    [("ok", 0, "OK"), ("warning", 1, "WARNING"), ("critical", 2, "CRITICAL"), ("unknown", 3, "UNKNOWN"), ("?", 3, "UNKNOWN")],
)  # fmt: skip
def test_status_has_the_level_and_the_words_of_the_controller(
    controller: FakeController, level: str, code: int, word: str
) -> None:
    controller.answers["GET", "/v1/status"] = status(level=level, headline="what is so.")
    result = run("status", socket=controller.path)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (code, f"{word}: what is so.")


def test_status_of_a_controller_that_gives_no_level_is_unknown(controller: FakeController) -> None:
    document = status()
    del document["level"], document["headline"]
    controller.answers["GET", "/v1/status"] = document
    result = run("status", socket=controller.path)
    assert result.exit_code == 3
    assert "older release" in result.stdout


def test_status_as_json_is_the_document_of_the_controller_with_the_same_exit_code(
    controller: FakeController,
) -> None:
    document = status(level="critical")
    controller.answers["GET", "/v1/status"] = document
    result = run("status", "--json", socket=controller.path)
    assert has(json.loads(result.stdout), {"schema_version": 1, **document})
    assert result.exit_code == 2


def test_json_carries_hostile_text_escaped(controller: FakeController) -> None:
    controller.answers["GET", "/v1/status"] = status(jobs=[job(name=HOSTILE)])
    result = run("status", "--json", socket=controller.path)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\uffff]", result.stdout)
    assert json.loads(result.stdout)["jobs"][0]["name"] == HOSTILE


# --------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "arguments", [["status"], ["incidents"], ["explain", "x"], ["pause"], ["resume"], ["restart", "1"]]
)
def test_without_a_controller_the_exit_code_is_unknown_and_the_next_step_is_named(
    tmp_path: Path, arguments: list[str]
) -> None:
    result = run(*arguments, socket=tmp_path / "none.sock")
    assert result.exit_code == 3
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first == f"The controller's socket {tmp_path}/none.sock does not exist."
    assert second.startswith("Is the controller running, on this machine? systemctl status slurm-watchdog-controller")


def test_with_json_a_failure_is_json_too(tmp_path: Path) -> None:
    result = run("incidents", "--json", socket=tmp_path / "none.sock")
    assert result.exit_code == 3
    assert "does not exist" in json.loads(result.stdout)["error"]


def test_socket_without_a_listener_has_another_sentence_than_a_missing_socket(
    controller: FakeController,
) -> None:
    controller.close()
    result = run("status", socket=controller.path)
    assert (result.exit_code, "No controller listens" in result.stderr) == (3, True)


def test_an_error_of_the_server_is_unknown_and_points_to_its_log(controller: FakeController) -> None:
    controller.answers["GET", "/v1/status"] = (500, {"error": "The journal\x1b[2J cannot be read."})
    result = run("status", socket=controller.path)
    assert result.exit_code == 3
    assert "The journal cannot be read." in result.stderr
    assert "journalctl -u slurm-watchdog-controller" in result.stderr


def test_a_refused_request_is_wrong_usage(controller: FakeController) -> None:
    controller.answers["GET", "/v1/incidents/no%2Fsuch"] = (404, {"error": "There is no incident no/such."})
    result = run("explain", "no/such", socket=controller.path)
    assert (result.exit_code, result.stderr) == (2, "There is no incident no/such.\n")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"mode": 1}', b"", b"[" * 100_000])
def test_an_answer_of_another_shape_is_not_believed(controller: FakeController, body: bytes) -> None:
    controller.answers["GET", "/v1/status"] = (200, body)
    result = run("status", socket=controller.path)
    assert result.exit_code == 3
    assert "is not what this release expects" in result.stderr


def test_an_error_without_a_sentence_names_its_code(controller: FakeController) -> None:
    controller.answers["GET", "/v1/status"] = (502, b"oops")
    assert "answered 502" in run("status", socket=controller.path).stderr


def test_the_deadline_holds_for_the_whole_request_even_if_bytes_trickle_in(tmp_path: Path) -> None:
    class Slow(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            try:
                self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(100):
                    self.request.sendall(b" ")
                    time.sleep(0.05)
            except OSError:
                pass

    with socketserver.UnixStreamServer(str(tmp_path / "slow"), Slow) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(ClientError, match=r"did not answer on .* within 0.3 s"):
            Client(str(tmp_path / "slow"), deadline_s=0.3).get(Status, "/v1/status")
        assert time.monotonic() - began < 2


def test_the_socket_comes_from_the_environment_and_else_from_the_configuration(
    controller: FakeController, tmp_path: Path
) -> None:
    controller.answers["GET", "/v1/status"] = status()
    assert run("status", SLURM_WATCHDOG_SOCKET=str(controller.path)).exit_code == 0
    config = tmp_path / "config.yaml"
    config.write_text(f"controller:\n  socket: {controller.path}\n")
    assert run("status", "--config", str(config)).exit_code == 0
    config.write_text("controler: {}\n")
    broken = run("status", "--config", str(config))
    assert (broken.exit_code, "did you mean 'controller'" in broken.stderr) == (2, True)


# ----------------------------------------------------------------------------------- incidents, explain


def test_incidents_as_json_is_the_list(controller: FakeController) -> None:
    controller.answers["GET", "/v1/incidents"] = [incident()]
    (row,) = json.loads(run("incidents", "--json", socket=controller.path).stdout)
    hints = row.pop("hints")
    assert has(row, incident())
    assert hints and all(set(hint) == {"usually", "try_next", "documented"} for hint in hints)


def test_explain_as_json_is_the_document(controller: FakeController) -> None:
    controller.answers["GET", "/v1/incidents/7f3a"] = explanation()
    document = json.loads(run("explain", "7f3a", "--json", socket=controller.path).stdout)
    hints = document.pop("hints")
    assert has(document, {"schema_version": 1, **explanation()})
    assert hints and all(set(hint) == {"usually", "try_next", "documented"} for hint in hints)


def diagnosis(**changes: Any) -> dict[str, Any]:
    return {
        "ranks": 8, "missing": [], "is_hang": True, "class": "collective_hang", "summary": "Job 4711 hangs: rank 3 …",
        "groups": [{"frames": ["all_reduce (d.py)", "train (t.py)"], "ranks": [0, 1, 2, 4, 5, 6, 7], "hosts": ["n1", "n2"],
                    "place": "collective"}],
        "culprits": [{"rank": 3, "host": "n2", "pid": 99, "reason": "data loader, in wait (queue.py:171)"}],
        "undumped": [{"rank": 5, "host": "n3", "pid": 7, "reason": "py-spy: Permission denied"}],
        "differences": [{"line": "rank 3 on n2: NCCL_SOCKET_IFNAME is eth1, that of the 7 others eth0"}],
        "filesystems": [], "nodes": [], **changes,
    }  # fmt: skip


def progress(state: str, document: Any = None, **changes: Any) -> dict[str, Any]:
    nodes = [{"node": "n1", "state": "answered", "ranks": 4}, {"node": "n2", "state": "asked"}]
    return {
        "id": "d1",
        "job_id": "4711",
        "state": state,
        "age_s": 3.0,
        "nodes": nodes,
        "diagnosis": document,
        **changes,
    }


def test_explain_as_json_fetches_what_is_too_large_to_come_with_the_rest(controller: FakeController) -> None:
    piece = {"at": 1.0, "kind": "node", "number": 5}
    controller.answers["GET", "/v1/incidents/7f3a"] = explanation(evidence=[piece])
    controller.answers["GET", "/v1/incidents/7f3a/evidence/5"] = {"node": "n1", "ranks": []}
    result = run("explain", "7f3a", "--json", socket=controller.path)
    assert has(json.loads(result.stdout)["evidence"], [{**piece, "document": {"node": "n1", "ranks": []}}])


def test_a_diagnosis_names_the_culprit_and_is_something_found(controller: FakeController) -> None:
    controller.answers["POST", "/v1/diagnose"] = progress("collecting")
    controller.answers["GET", "/v1/diagnose/d1"] = progress("done", diagnosis())
    result = run("diagnose", "4711", socket=controller.path)
    assert result.exit_code == 1, result.output
    document = json.loads(run("diagnose", "4711", "--json", socket=controller.path).stdout)
    assert (document["job_id"], document["class"], document["culprits"][0]["pid"]) == (
        "4711",
        "collective_hang",
        99,
    )


@pytest.mark.parametrize(("is_hang", "code"), [(False, 0), (True, 1), (None, 3)])
def test_the_code_of_a_diagnosis_says_whether_anybody_is_stuck(
    controller: FakeController, is_hang: bool | None, code: int
) -> None:
    controller.answers["POST", "/v1/diagnose"] = progress("collecting")
    controller.answers["GET", "/v1/diagnose/d1"] = progress("done", diagnosis(is_hang=is_hang))
    assert run("diagnose", "4711", "--json", socket=controller.path).exit_code == code


def test_a_job_that_is_not_known_is_unknown_and_not_well(controller: FakeController, tmp_path: Path) -> None:
    controller.answers["POST", "/v1/diagnose"] = (
        404,
        {"error": "job 9 has no ranks to be asked: it is not watched."},
    )
    result = run("diagnose", "9", socket=controller.path)
    assert (result.exit_code, "is not watched" in result.stderr) == (3, True)
    assert run("diagnose", "9", socket=tmp_path / "none").exit_code == 3
    assert run("diagnose", "nine", socket=controller.path).exit_code == 2


def test_a_job_that_ended_meanwhile_has_no_diagnosis(controller: FakeController) -> None:
    controller.answers["POST", "/v1/diagnose"] = progress("collecting")
    controller.answers["GET", "/v1/diagnose/d1"] = progress("done")
    result = run("diagnose", "4711", socket=controller.path)
    assert (result.exit_code, "has ended" in result.stderr) == (3, True)


# ------------------------------------------------------------------------------- pause, resume, restart


def test_pause_and_resume_send_the_reason_and_say_what_it_means(controller: FakeController) -> None:
    controller.answers["POST", "/v1/pause"] = {"paused": {"reason": "moving", "by": "ann", "at": 1.0}}
    controller.answers["POST", "/v1/resume"] = {"paused": None}
    paused = run("pause", "moving", socket=controller.path)
    assert (paused.exit_code, paused.stdout.split(":")[0]) == (0, "Paused (moving)")
    assert run("resume", socket=controller.path).exit_code == 0
    assert controller.requests == [("POST", "/v1/pause", {"reason": "moving"}), ("POST", "/v1/resume", {})]
    assert json.loads(run("resume", "--json", socket=controller.path).stdout) == {
        "schema_version": 1,
        "paused": None,
    }


HELD = {"id": "s1", "nodes": ["n1"], "by": "ann", "reason": "a cable", "at": 1.0, "until": 3600.0}


def test_silence_sends_what_is_selected_and_lists_what_holds(controller: FakeController) -> None:
    controller.answers["POST", "/v1/silences"] = {"id": "s1", "silences": [HELD]}
    controller.answers["GET", "/v1/silences"] = {"id": None, "silences": []}
    controller.answers["POST", "/v1/silences/s1/end"] = {"id": None, "silences": []}
    made = run("silence", "--node", "n[1-2]", "--for", "4h", "--reason", "a cable", socket=controller.path, TZ="UTC")
    assert made.exit_code == 0 and made.stdout.startswith("node n1, silenced by ann until 1970-01-01")
    assert "Nothing is silenced" in run("silence", socket=controller.path).stdout
    assert run("silence", "--end", "s1", socket=controller.path).exit_code == 0
    body = {"kinds": [], "jobs": [], "nodes": ["n1", "n2"], "for_s": 14400.0, "reason": "a cable"}
    assert controller.requests == [
        ("POST", "/v1/silences", body), ("GET", "/v1/silences", None), ("POST", "/v1/silences/s1/end", {}),
    ]  # fmt: skip
    wrong = run("silence", "--node", "n1", "--for", "2", socket=controller.path)
    assert (wrong.exit_code, "a duration needs a number and a unit" in wrong.stderr) == (2, True)


JOBS = [{"job_id": "7", "user": "ann", "nodes": ["n1"], "step": 12, "why_not": ""},
        {"job_id": "8", "user": "bob", "nodes": ["n2"], "step": None, "why_not": "it hangs"}]  # fmt: skip


def ended(outcome: str, detail: str) -> dict[str, Any]:
    end = {"ok": outcome == "ok", "needless": False, "ended_at": 1.0, "detail": detail}
    return {"i7": {"decision_id": "d7", "end": end}}


def test_save_all_asks_those_that_can_be_asked_and_lists_the_others_first(controller: FakeController) -> None:
    controller.answers["GET", "/v1/requests/jobs"] = JOBS
    controller.answers["POST", "/v1/requests"] = [{"job_id": "7", "verdict": "allowed", "incident_id": "i7"}]
    controller.answers["POST", "/v1/requests/progress"] = ended("ok", "the job has saved")
    told = run("save-all", "7", "8", "--hold", "--reason", "move", socket=controller.path)
    assert told.exit_code == 1, "one was not saved"
    lines = told.stdout.splitlines()
    assert lines[0] == "2 jobs, 1 of them cannot be asked."
    rows = [line.split()[0] for line in lines if line.startswith(("7 ", "8 "))]
    assert rows == ["8", "7"]
    assert has(controller.requests[1][2], {"wish": "hold", "before": None, "reason": "move", "job_ids": ["7"]})
    document = json.loads(run("save-all", "7", "8", "9", "--json", socket=controller.path).stdout)
    assert [(row["job_id"], row["state"]) for row in document["jobs"]] == [
        ("8", "cannot be asked"), ("9", "cannot be asked"), ("7", "done"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "saved"), [(OperationOutcome.DONE, True), (None, False), (OperationOutcome.FAILED, False)]
)
def test_a_job_has_saved_as_soon_as_its_checkpoint_is_proven(outcome: OperationOutcome | None, saved: bool) -> None:
    row = Row(SelectedJob(job_id="7"))
    done = Operation(operation="wait_checkpoint", intent_at=1.0, outcome=outcome)
    row.follow(ActionRun(decision_id="d7", operations=(done,)))
    assert (row.state, row.has_saved) == ("under way", saved)


def test_save_all_lists_and_asks_nobody_with_dry_run(controller: FakeController) -> None:
    controller.answers["GET", "/v1/requests/jobs"] = JOBS
    told = run("save-all", "--all", "--dry-run", socket=controller.path)
    assert (told.exit_code, "it hangs" in told.stdout, len(controller.requests)) == (1, True, 1)


def test_more_than_a_thousand_jobs_are_followed(controller: FakeController) -> None:
    names = [str(number) for number in range(1100)]

    def answer(method: str, target: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            return 200, [{"job_id": each} for each in names]
        if target == "/v1/requests":
            rows = [{"job_id": each, "verdict": "allowed", "incident_id": f"i{each}"} for each in body["job_ids"]]
            return 200, rows
        if len(body["incident_ids"]) > 1000:
            return 400, {"error": "incident_ids has to be a list of at most 1000 ids"}
        end = ended("ok", "saved")["i7"]
        return 200, dict.fromkeys(body["incident_ids"], end)

    controller.answer = answer
    told = run("save-all", "--all", "--json", socket=controller.path)
    assert told.exit_code == 0 and {each["state"] for each in json.loads(told.stdout)["jobs"]} == {"done"}


def test_following_ends_at_once_where_the_controller_refuses_it(controller: FakeController) -> None:
    refused = (403, {"error": "who is asking is not known"})
    controller.answers["GET", "/v1/requests/jobs"] = JOBS[:1]
    controller.answers["POST", "/v1/requests"] = [{"job_id": "7", "verdict": "allowed", "incident_id": "i7"}]
    controller.answers["POST", "/v1/requests/progress"] = refused
    told = run("save-all", "--all", socket=controller.path)
    assert (told.exit_code, "who is asking is not known" in told.stderr) == (3, True)
    restarts(controller, refused)
    told = run("restart", "4711", socket=controller.path)
    assert (told.exit_code, "who is asking is not known" in told.stderr) == (3, True)


def test_what_the_controller_does_not_show_is_not_waited_for(controller: FakeController) -> None:
    """An older one hides a colleague's own request from him."""
    controller.answers["GET", "/v1/requests/jobs"] = JOBS[:1]
    controller.answers["POST", "/v1/requests"] = [{"job_id": "7", "verdict": "allowed", "incident_id": "i7"}]
    controller.answers["POST", "/v1/requests/progress"] = {}
    told = run("save-all", "--all", socket=controller.path)
    assert (told.exit_code, "for its owner and operators to see" in " ".join(told.stdout.split())) == (1, True)
    restarts(controller, [])
    told = run("restart", "4711", socket=controller.path)
    assert (told.exit_code, "does not show you how far it is" in told.stderr) == (3, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("save-all", "--all"), "No job runs."), (("save-all", "--all", "--dry-run"), "No job runs."),
     (("save-all", "7"), "it does not run"), (("restart", "7", "8", "--no-wait"), "it does not run")],
)  # fmt: skip
def test_where_no_job_runs_it_is_no_success(controller: FakeController, words: tuple[str, ...], said: str) -> None:
    controller.answers["GET", "/v1/requests/jobs"] = []
    told = run(*words, socket=controller.path)
    assert (told.exit_code, said in told.stdout) == (1, True)
    assert len(controller.requests) == 1


@pytest.mark.parametrize(
    "arguments",
    [("save-all",), ("save-all", "--all", "7"), ("save-all", "--all", "--before", "soon"), ("restart",),
     ("restart", "n7"), ("restart", "--user", "ann"), ("restart", "7", "8", "--now")],
)  # fmt: skip
def test_jobs_have_to_be_named_in_one_way(controller: FakeController, arguments: tuple[str, ...]) -> None:
    assert (run(*arguments, socket=controller.path).exit_code, controller.requests) == (2, [])


def test_a_time_of_the_day_is_the_next_one_also_over_a_night_in_which_clocks_are_changed() -> None:
    """At 22:00 before such a night "06:00" was 07:00, or 05:00: an hour into the maintenance."""
    with time_zone():
        for evening in ("2026-03-28T22:00", "2026-10-24T22:00", "2026-11-28T22:00"):
            now = datetime.fromisoformat(evening).astimezone().timestamp()
            morning = f"{evening[:8]}{int(evening[8:10]) + 1}T06:00"
            assert parse_date("06:00", now) == parse_date(morning, now) == datetime.fromisoformat(morning).timestamp()
            assert parse_date("23:30", now) == now + 5400 and parse_date("2h", now) == now + 7200


def test_restart_of_several_jobs_moves_all_of_them(controller: FakeController) -> None:
    controller.answers["GET", "/v1/requests/jobs"] = JOBS
    controller.answers["POST", "/v1/requests"] = [{"job_id": "7", "verdict": "allowed", "incident_id": "i7"}]
    told = run("restart", "7", "8", "--exclude", "n1", "--no-wait", socket=controller.path)
    assert "under way" in told.stdout and told.exit_code == 1, "one was not allowed"
    assert has(controller.requests[1][2], {"wish": "restart", "exclude": ["n1"], "reason": "", "job_ids": ["7"]})


def test_a_component_of_a_heterogeneous_job_stands_for_the_job(controller: FakeController) -> None:
    controller.answers["GET", "/v1/incidents?job=4711"] = []
    assert run("incidents", "-j", "4711+1", socket=controller.path).exit_code == 0
    assert run("doctor", "-j", "4711+1", socket=controller.path).output.startswith("UNKNOWN: job 4711: ")
    run("diagnose", "4711+1", socket=controller.path)
    assert controller.requests[-1][1:] == ("/v1/diagnose", {"job_id": "4711"})


def test_what_a_command_does_with_its_result_comes_after_it_is_printed() -> None:
    measure = command(JSON)(lambda asked: Answer({}, ["measured"], then=lambda: click.echo("sent")))
    assert CliRunner().invoke(measure).output == "measured\nsent\n"


def test_status_me_asks_for_ones_own(controller: FakeController) -> None:
    controller.answers["GET", "/v1/status?me=1"] = status()
    assert run("status", "--me", socket=controller.path).exit_code == 0
    assert run("status", "--me", "--watch", socket=controller.path).exit_code == 2
    wrong = run("status", SLURM_WATCHDOG_SOCKET="munge://nowhere")
    assert (wrong.exit_code, "is not a controller's address" in wrong.stderr) == (3, True)


def allowed(**changes: Any) -> dict[str, Any]:
    return {"incident_id": "7f3a", "decision_id": "d1", "verdict": "allowed", "by": "operator_restart",
            "reason": "no guard objects", **changes}  # fmt: skip


def restarts(controller: FakeController, *stages: Any) -> None:
    """The controller allows a restart; each look at it shows the next of `stages`, the last one for ever."""
    left = list(stages)

    def answer(method: str, target: str, body: Any) -> tuple[int, Any]:
        if target == "/v1/restart":
            return 200, allowed()
        stage = left.pop(0) if len(left) > 1 else left[0]
        return stage if isinstance(stage, tuple) else (200, dict(zip(["7f3a"], stage, strict=False)))

    controller.answer = answer


ENDED = {"ok": True, "ended_at": 1.0, "detail": "", "resumed_at_step": 121, "steps_lost": 0, "downtime_s": 30.0}


def test_restart_is_followed_rung_by_rung_to_its_end(controller: FakeController) -> None:
    written = operation("write_kill_switch", "done", "on 3 nodes")
    restarts(
        controller,
        [],
        [action([written, operation("wait_checkpoint", None)], None)],
        (503, {"error": "The controller is starting."}),
        [action([written, operation("wait_checkpoint", "done"), operation("confirm", "done")], ENDED)],
    )
    result = run(
        "restart",
        "4711",
        "--exclude",
        "n[7-8]",
        "--exclude",
        "n7",
        "--reason",
        "slow",
        socket=controller.path,
    )
    assert result.exit_code == 0, result.output
    assert controller.requests[0] == (
        "POST", "/v1/restart", {"job_id": "4711", "exclude": ["n7", "n8"], "reason": "slow", "now": False},
    )  # fmt: skip
    lines = [re.sub(r"^[\d-]{10} [\d:]{8}  ", "", line) for line in result.stdout.splitlines()]
    assert lines == [
        "Restart of job 4711 is under way (incident 7f3a).",
        "write_kill_switch: done, on 3 nodes",
        "wait_checkpoint: begun",
        "wait_checkpoint: done",
        "confirm: done",
        "graceful_restart succeeded (resumed at step 121, 0 steps lost, 30 s to its first new step).",
    ]


def test_restart_says_what_it_waits_for_and_until_when_once(controller: FakeController) -> None:
    waiting = action([operation("write_kill_switch", "done")], None) | {
        "waiting": {"for": "waiting for a complete checkpoint", "until": 1_700_000_000.0}
    }
    restarts(controller, [waiting], [waiting], [action([operation("confirm", "done")], ENDED)])
    result = run("restart", "4711", socket=controller.path)
    assert result.exit_code == 0
    assert result.stdout.count("Now: waiting for a complete checkpoint, until 2023-11-14") == 1


def test_restart_of_a_job_that_hangs_needs_now_where_nobody_can_be_asked(controller: FakeController) -> None:
    sentence = (
        "job 4711 hangs: its loop cannot see a kill switch. It can be requeued now, from checkpoint 90: ask with --now"
    )
    controller.answers["POST", "/v1/restart"] = (409, {"error": sentence, "code": "hangs"})
    result = run("restart", "4711", socket=controller.path)
    assert result.exit_code == 1 and "ask with --now" in result.output
    restarts(controller, [action([operation("confirm", "done")], ENDED)])
    assert run("restart", "4711", "--now", socket=controller.path).exit_code == 0
    assert [body["now"] for _, path, body in controller.requests if path == "/v1/restart"] == [False, True]


def test_a_restart_that_failed_is_something_found(controller: FakeController) -> None:
    end = {"ok": False, "ended_at": 1.0, "detail": "no checkpoint within 1800 s"}
    restarts(controller, [action([operation("wait_checkpoint", "failed", "no checkpoint")], end)])
    result = run("restart", "4711", socket=controller.path)
    assert result.exit_code == 1
    assert result.stdout.endswith("graceful_restart failed: no checkpoint within 1800 s.\n")


def test_restart_as_json_is_one_document_with_its_end(controller: FakeController) -> None:
    restarts(controller, [action([operation("confirm", "done")], ENDED)])
    result = run("restart", "4711", "--json", socket=controller.path)
    document = json.loads(result.stdout)
    assert document.items() >= allowed().items() and document["operations"] == [operation("confirm", "done")]
    assert document["end"].items() >= ENDED.items()


def test_restart_without_waiting_leaves_after_the_verdict(controller: FakeController) -> None:
    controller.answers["POST", "/v1/restart"] = allowed()
    result = run("restart", "4711", "--no-wait", socket=controller.path)
    assert (result.exit_code, len(controller.requests)) == (0, 1)


def test_a_restart_that_the_controller_refuses_is_something_found(controller: FakeController) -> None:
    controller.answers["POST", "/v1/restart"] = (404, {"error": "Slurm has no running job 9."})
    result = run("restart", "9", socket=controller.path)
    assert (result.exit_code, result.stderr) == (1, "Slurm has no running job 9.\n")


@pytest.mark.parametrize(
    "arguments",
    [["restart", "x"], ["restart", "1;reboot"], ["restart", "1", "--exclude", "@all"], ["restart", "1", "--exclude", "n[1"],
     ["restart", "1", "--exclude", "n1 n2"], ["restart"], ["explain"], ["nonsense"]],
)  # fmt: skip
def test_wrong_usage_has_its_own_code_and_asks_nobody(tmp_path: Path, arguments: list[str]) -> None:
    assert run(*arguments, SLURM_WATCHDOG_SOCKET=str(tmp_path / "none")).exit_code == 2


# ------------------------------------------------------------------------------ check-config, services


def test_check_config_prints_every_error_with_its_line_and_exits_with_2(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mode: maybe\nagent:\n  interval: 5\n")
    result = run("check-config", str(file))
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert lines[0] == f"{file} has 2 errors and would be refused:"
    assert lines[1].startswith(f"{file}:1: mode: ")
    assert lines[2].startswith(f"{file}:3: agent.interval: a duration needs a number and a unit")
    document = json.loads(run("check-config", str(file), "--json").stdout)
    assert [(each["path"], each["line"]) for each in document["problems"]] == [
        ("mode", 1),
        ("agent.interval", 3),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("notify: {slack: {webhook_url_file: 'https://hooks.example/T1'}}", "must be the name of a file that holds"),
        ("notify: {slack: {webhook_url_file: secrets/slack}}", "must be an absolute path"),
        ("mode: observe", "Warning: controller: not set"),
        ("detectors: {collective_hang: {floor: 1h}}", "is longer than the timeout of a collective"),
        ("detectors: {checkpoint_overdue: {mode: act}}", "except (kind: checkpoint_overdue): restart has no effect"),
        ("policy: {kinds: {disk_full: {mode: act}}}", "except (kind: disk_full): restart has no effect"),
    ],
)
def test_check_config_says_what_is_hardly_meant(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert said in " ".join(run("check-config", str(file)).stdout.split())


def test_help_is_no_command_but_what_it_says() -> None:
    assert run("help").stdout == run("--help").stdout
    assert run("help", "status").stdout == run("status", "--help").stdout


def test_check_config_is_content_with_the_example(checkout: Path) -> None:
    result = run("check-config", str(checkout / "config.example.yaml"))
    assert (result.exit_code, "is fine: restart: never" in result.stdout) == (0, True)
    assert json.loads(run("check-config", str(checkout / "config.example.yaml"), "--json").stdout)["ok"] is True


@pytest.mark.parametrize("service", ["agent", "controller"])
def test_a_service_does_not_start_with_a_wrong_configuration(tmp_path: Path, service: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("agent:\n  intervall: 5s\n")
    result = run(service, "--config", str(file))
    assert result.exit_code == 2
    assert "c.yaml:2: agent.intervall: unknown key; did you mean 'interval'?" in result.stderr


def test_explain_of_an_empty_id_is_refused_without_a_question_to_the_controller(
    controller: FakeController,
) -> None:
    result = run("explain", " ", socket=controller.path)
    assert (result.exit_code, controller.requests) == (2, [])
    assert "The incident's id is empty" in result.stderr


def test_incidents_counts_as_firing_neither_explained_ones_nor_a_persons_restart(
    controller: FakeController,
) -> None:
    others = [incident(id="b", inhibited_by="7f3a"), incident(id="c", kind="operator_restart")]
    controller.answers["GET", "/v1/incidents"] = others
    result = run("incidents", socket=controller.path)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "2 incidents, none firing.")
    controller.answers["GET", "/v1/incidents"] = [incident(), *others]
    result = run("incidents", socket=controller.path)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "3 incidents, 1 firing.")
