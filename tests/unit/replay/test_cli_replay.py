"""`slurm-watchdog replay`: what people and programs get to see, and the exit codes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_watchdog.cli.main import main
from slurm_watchdog.recording.entries import pack
from tests.builders.told import STARTED_S, Told
from tests.replay import scenes

INCIDENT_KEYS = {
    "id", "kind", "state", "severity", "job_id", "opened_at", "detected_after_s", "culprits", "summary", "evidence", "decisions",
}  # fmt: skip
EPOCH = 1.7e9
OUTAGE, STALL, HEALTHY = (
    b"".join(pack(each._replace(wall=EPOCH + each.at)) for each in Told().entries(lines))
    for lines in (scenes.filesystem_outage(), scenes.filesystem_stall(), scenes.training(120))
)


@pytest.fixture
def outage(tmp_path: Path) -> Path:
    (tmp_path / "outage").write_bytes(OUTAGE)
    return tmp_path / "outage"


def run(*words: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, words)], input=stdin)


def test_a_healthy_recording_gives_nothing_and_code_0() -> None:
    result = run("-", stdin=HEALTHY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "nothing found" in result.stdout


def test_an_incident_is_a_row_that_says_who_and_what_would_have_been_done() -> None:
    result = run("-", stdin=STALL)
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if "filesystem_stall  " in line)
    for words in ("1882409", "2023-11-1", "rank 0 pid 280058 on n0", "requeue without n0"):
        assert words in row


def test_json_is_the_array_of_the_incidents_command_and_nothing_else(outage: Path) -> None:
    result = run("--json", outage)
    assert (result.exit_code, result.stderr) == (1, "")
    (incident,) = json.loads(result.stdout)["incidents"]
    assert set(incident) >= INCIDENT_KEYS
    assert (incident["kind"], incident["state"], incident["job_id"]) == ("filesystem_outage", "firing", "1882409")
    assert [(c["node"], c["rank"]) for c in incident["culprits"]] == [("n0", 0), ("n1", 2)]
    assert incident["opened_at"] == pytest.approx(EPOCH + STARTED_S + 101, abs=1)
    assert 60 <= incident["detected_after_s"] <= 70
    assert incident["decisions"][0] | {"reason": ""} == {
        "action": "none", "verdict": "allowed", "by": "filesystem_outage", "reason": "", "exclude": [], "outcome": None,
        "rule": "what is shipped for filesystem_outage", "ladder": [],
    }  # fmt: skip


def test_several_recordings_are_replayed_each_by_itself(outage: Path, tmp_path: Path) -> None:
    (tmp_path / "stall").write_bytes(STALL)
    result = run("--json", outage, tmp_path / "stall", outage)
    found = [(Path(i["trace"]).stem, i["id"]) for i in json.loads(result.stdout)["incidents"] if i["state"] == "firing"]
    assert [name for name, _ in found] == ["outage", "stall", "outage"]
    assert len({number for _, number in found}) == 3


def test_parts_in_the_wrong_order_are_no_recording_in_which_nothing_is_wrong() -> None:
    half = HEALTHY.index(b"\n\n", len(HEALTHY) // 2) + 1
    result = run("-", stdin=HEALTHY[half:] + HEALTHY[:half])
    assert result.exit_code == 2
    assert "the time goes back" in result.stderr
    assert "too much was skipped to say that nothing is wrong" in result.stderr


def test_an_end_that_is_missing_is_no_reason_for_doubt() -> None:
    result = run("-", stdin=HEALTHY[:-5])
    assert (result.exit_code, "too much was skipped" in result.stderr) == (0, False)
    assert "1 entry skipped: damaged, or cut short" in result.stderr


def test_packed_recordings_and_standard_input_are_read(outage: Path, tmp_path: Path) -> None:
    packed = tmp_path / "recording.gz"
    packed.write_bytes(gzip.compress(OUTAGE))
    plain = json.loads(run("--json", outage).stdout)
    assert json.loads(run("--json", packed).stdout) == plain
    assert json.loads(run("--json", "-", stdin=OUTAGE).stdout) == plain


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x1f\x8b broken", ""),
        (gzip.compress(OUTAGE, mtime=0)[:500], "cannot be read to its end"),
        (b"a,b,c\n1,2,3\n", "holds no entry of a recording"),
        (b"\x00" * 99, "holds no entry of a recording"),
        (b"", "is empty"),
        (b'{"t":0,"kind":"job","job_id":"1"}\n', "is a trace of release 0.1"),
        (b'{"t": 5.5, "kind": "report"}\n', "is a trace of release 0.1"),
    ],
)
def test_a_file_that_is_no_recording_ends_with_a_sentence_and_code_2(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "strange"
    file.write_bytes(content)
    result = run("--json", file)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["incidents"] == []
    assert str(file) in result.stderr and says in result.stderr
    assert "Traceback" not in result.stderr


def test_cli_replay_reports_unreadable_files_and_replays_the_others(outage: Path, tmp_path: Path) -> None:
    result = run("--json", tmp_path / "missing", tmp_path, outage)
    assert result.exit_code == 2
    assert [i["kind"] for i in json.loads(result.stdout)["incidents"]] == ["filesystem_outage"]
    assert "No such file" in result.stderr
    assert "Is a directory" in result.stderr


def test_a_recording_has_to_be_named_and_a_wrong_configuration_is_refused(outage: Path, tmp_path: Path) -> None:
    assert run().exit_code == 2
    (tmp_path / "config.yaml").write_text("mode: maybe")
    result = run("--config", tmp_path / "config.yaml", outage)
    assert result.exit_code == 2
    assert "mode" in result.stderr


def test_the_configuration_decides_as_in_the_service(outage: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("detectors: {filesystem_stall: {blocked_for: 2min}}")
    assert run("--config", tmp_path / "config.yaml", outage).exit_code == 0


def test_words_of_a_recording_cannot_drive_the_terminal() -> None:
    lines = [
        line | ({"path": "/gpfs/m4/main\x1b[2Jlog"} if "path" in line else {}) for line in scenes.filesystem_stall()
    ]
    result = run("-", stdin=b"".join(map(pack, Told().entries(lines))))
    assert result.exit_code == 1 and "main" in result.output
    assert "\x1b" not in result.output
