"""A person's own `run` and `attach`: found without being named while they live, asked by their journal afterwards."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, ActionEnd, Verdict
from slurm_watchdog.model.incidents import IncidentKind, IncidentState
from slurm_watchdog.notify.notification import Caller
from slurm_watchdog.standalone import own_runs, report
from slurm_watchdog.standalone import run as service
from slurm_watchdog.standalone.own_runs import OwnRun
from tests.builders.cli import FakeController, run, status
from tests.builders.evidence_rows import add_evidence
from tests.builders.notices import DECISION, INCIDENT, RUN, Ticking, replace, told


def own(place: Path, directory: Path, at: float, **changes: object) -> OwnRun:
    directory.mkdir(exist_ok=True)
    found = OwnRun(
        command="run",
        what="python train.py",
        directory=str(directory),
        host=socket.gethostname(),
        started_at=at,
    )
    found = OwnRun(**{**vars(found), **changes})
    own_runs.write_run(place, found)
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return own_runs.state_home(tmp_path, {"XDG_STATE_HOME": str(tmp_path)})


@pytest.fixture
def lives(place: Path, tmp_path: Path) -> Iterator[FakeController]:
    run_of = own(place, tmp_path / "a", 1.0)
    fake = FakeController(Path(run_of.socket))
    fake.answers["GET", "/v1/status"] = status()
    yield fake
    fake.close()


def journal_with_an_incident(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    journal = Journal(f"sqlite:///{directory / own_runs.JOURNAL}")
    journal.save_incident(INCIDENT)
    journal.add_note(INCIDENT.id, INCIDENT.opened_at, "it began")
    add_evidence(journal, INCIDENT.id, INCIDENT.opened_at, "diagnosis", {"summary": "rank 2 is late"})
    journal.add_decision(DECISION)
    journal.close()


def test_status_without_a_socket_finds_the_users_own_run(lives: FakeController) -> None:
    result = run("status")
    assert (result.exit_code, lives.requests) == (0, [("GET", "/v1/status", None)])
    assert "4711" in result.stdout


def test_status_of_several_own_runs_shows_each_and_ends_with_the_worst(
    place: Path, lives: FakeController, tmp_path: Path
) -> None:
    other = FakeController(Path(own(place, tmp_path / "b", 2.0, what="python other.py").socket))
    other.answers["GET", "/v1/status"] = status(level="critical", headline="1 job hangs.")
    try:
        result = run("status")
        assert result.exit_code == 2
        assert result.stdout.index("python other.py") < result.stdout.index("python train.py")
        assert "CRITICAL: 1 job hangs." in result.stdout
        documents = json.loads(run("status", "--json").stdout)["runs"]
        assert [each["directory"] for each in documents] == [str(tmp_path / "b"), str(tmp_path / "a")]
        refused = run("diagnose", "4711")
        assert refused.exit_code == 2
        assert f"--socket {tmp_path}/a/controller.sock" in refused.stderr
    finally:
        other.close()


def test_a_run_that_was_killed_is_over_and_one_on_another_host_is_neither(place: Path, tmp_path: Path) -> None:
    journal_with_an_incident(tmp_path / "killed")
    journal_with_an_incident(tmp_path / "elsewhere")
    own(place, tmp_path / "killed", 1.0)
    own(place, tmp_path / "elsewhere", 2.0, host="another")
    own(place, tmp_path / "empty", 3.0, ended_at=4.0)
    (place / "runs" / "5-broken.json").write_text("[1, {")
    assert own_runs.running_runs(place) == []
    assert [Path(each.directory).name for each in own_runs.ended_runs(place)] == ["killed"]


def test_the_oldest_runs_are_forgotten(place: Path, tmp_path: Path) -> None:
    for number in range(own_runs.MAX_RUNS + 3):
        own(place, tmp_path, 1000.0 + number)
    assert len(own_runs.read_runs(place)) == own_runs.MAX_RUNS
    assert own_runs.read_runs(place)[-1].started_at == 1003.0


def test_the_journal_of_an_ended_run_answers_incidents_explain_and_bundle_and_is_left_as_it_is(
    place: Path, tmp_path: Path
) -> None:
    journal_with_an_incident(tmp_path / "ended")
    file = tmp_path / "ended" / own_runs.JOURNAL
    before = file.read_bytes()
    own(place, tmp_path / "ended", 1.0, ended_at=2.0)
    for more in ((), ("--journal", str(tmp_path / "ended")), ("--journal", str(file))):
        assert INCIDENT.id in run("incidents", *more).stdout
        found = json.loads(run("explain", INCIDENT.id[:4], "--json", *more).stdout)
        assert found["timeline"] == [{"at": INCIDENT.opened_at, "text": "it began"}]
        assert found["evidence"][0]["document"] == {"summary": "rank 2 is late"}
        assert found["incident"]["decisions"][0]["action"] == DECISION.action
    bundle = tmp_path / "f.tar.gz"
    assert run("explain", INCIDENT.id, "--bundle", str(bundle)).exit_code == 0
    assert bundle.stat().st_size > 200
    assert run("explain", "nosuch", "--journal", str(file)).exit_code == 2
    assert file.read_bytes() == before
    assert sorted(each.name for each in file.parent.iterdir()) == [own_runs.JOURNAL]


@pytest.mark.parametrize("content", [None, b"", b"no journal at all"])
def test_incidents_of_a_file_that_is_no_journal_are_refused_with_a_sentence(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "x.sqlite"
    if content is not None:
        file.write_bytes(content)
    result = run("incidents", "--journal", str(file))
    assert result.exit_code == 3
    assert str(file) in result.stderr
    assert "Traceback" not in result.output


def test_a_run_that_does_not_answer_points_to_its_journal_and_not_to_systemctl(place: Path, tmp_path: Path) -> None:
    journal_with_an_incident(tmp_path / "ended")
    result = run("status", socket=tmp_path / "ended" / "controller.sock")
    assert result.exit_code == 3
    assert f"slurm-watchdog incidents --journal {tmp_path / 'ended'}" in result.stderr
    assert "systemctl" not in result.stderr


def test_a_run_greets_with_its_places_and_sums_up_what_happened(tmp_path: Path) -> None:
    this = OwnRun(command="run", what="python train.py", directory=str(tmp_path), host="h", started_at=1.0)
    greeting = "\n".join(report.greeting(this, parse_config("expert: {controller: {page_listen: '127.0.0.1:9767'}}")))
    for word in (
        "python train.py",
        "http://127.0.0.1:9767",
        f"{tmp_path}/controller.sock",
        "slurm-watchdog status",
    ):
        assert word in greeting
    journal_with_an_incident(tmp_path)
    journal = Journal(f"sqlite:///{tmp_path / own_runs.JOURNAL}")
    journal.end_action(
        DECISION.id,
        ActionEnd(ok=True, ended_at=9.0, detail="first new step 21", steps_lost=9, steps_lost_at_most=12),
    )
    journal.save_incident(replace(INCIDENT, id="mine", kind=IncidentKind.OPERATOR_RESTART))
    journal.save_incident(replace(INCIDENT, id="part", inhibited_by=INCIDENT.id))
    lines = report.summary(this, journal, how="ended with exit code 0", took_s=7200.0, restarts=1)
    assert lines[0] == (
        "slurm-watchdog run: python train.py ended with exit code 0 after 2 h 00 min: 1 restart, 1 incident, 9 to 12 steps lost"
    )
    assert lines[-1] == f"  history    slurm-watchdog incidents --journal {tmp_path}"


def test_a_run_prints_two_lines_for_a_hang(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong, and what came of it; where nothing is done the second one says why, and what it needed is not
    repeated when it is over."""
    journal_with_an_incident(tmp_path)
    ticking = Ticking(Journal(f"sqlite:///{tmp_path / own_runs.JOURNAL}"))
    report.tell(ticking.notifier)
    over = replace(INCIDENT, state=IncidentState.RESOLVED, resolved_at=9.0, resolution="it trains again")
    observed = replace(DECISION, action=Action.REQUEUE, verdict=Verdict.OBSERVED, by="mode")
    for incident_id, decision in (("mended", DECISION), ("watched", observed)):
        told = replace(INCIDENT, id=incident_id)
        ticking.notifier.opened(told)
        ticking.notifier.decided(told, decision)
        ticking.notifier.diagnosed(told, ("rank 3 waits",))
        if decision is DECISION:
            ticking.notifier.ended(told, RUN)
        ticking.notifier.resolved(replace(over, id=incident_id))
    asyncio.run(ticking.run_until_empty())
    first, ended, *others = caplog.messages
    assert "was restarted" in ended and first == others[0] and len(others) == 2
    assert "would have been requeued, but was not touched" in others[1]


def test_a_run_keeps_the_cluster_name_of_its_configuration_and_uses_the_hosts_without_one(
    tmp_path: Path,
) -> None:
    wanted = service.RunRequest(command=("true",), directory=tmp_path)
    assert service.config_for(parse_config("cluster_name: lab"), wanted, "").cluster_name == "lab"
    host = socket.gethostname().partition(".")[0]
    assert service.config_for(parse_config("mode: observe"), wanted, "").cluster_name == host


def test_messages_of_a_run_name_commands_that_its_reader_has() -> None:
    requeue = replace(DECISION, action=Action.REQUEUE, verdict=Verdict.OBSERVED)
    said = told(INCIDENT, requeue, Caller.RUN)
    assert said.todo == "Manually: slurm-watchdog restart --now 7. To have it done: leave out --observe"
    assert "restart --now --exclude n1 7." in told(INCIDENT, requeue).todo
