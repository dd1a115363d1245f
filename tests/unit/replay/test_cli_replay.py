"""`slurm-watchdog replay`: what people and programs get to see, and the exit codes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_watchdog.cli.main import main

TRACES = Path(__file__).resolve().parents[2] / "replay"
OUTAGE = TRACES / "filesystem_outage.jsonl"
INCIDENT_KEYS = {
    "id", "kind", "state", "severity", "job_id", "opened_at", "detected_after_s", "culprits", "summary", "evidence", "decisions",
}  # fmt: skip


def run(*words: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, words)], input=stdin)


def test_a_healthy_trace_gives_nothing_and_code_0() -> None:
    result = run(TRACES / "irregular.jsonl")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "nothing found" in result.stdout


def test_an_incident_is_a_row_that_says_who_and_what_would_have_been_done() -> None:
    result = run(TRACES / "filesystem_stall.jsonl")
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if "filesystem_stall  " in line)
    for words in ("1882409", "101 s", "rank 0 pid 280058 on n0", "requeue without n0"):
        assert words in row


def test_json_is_the_array_of_the_incidents_command_and_nothing_else() -> None:
    result = run("--json", TRACES / "nonsense.jsonl")
    assert result.exit_code == 1
    (incident,) = json.loads(result.stdout)["incidents"]
    assert set(incident) >= INCIDENT_KEYS
    assert (incident["kind"], incident["state"], incident["job_id"]) == (
        "filesystem_outage",
        "firing",
        "1882409",
    )
    assert [(c["node"], c["rank"], c["gpu_uuid"]) for c in incident["culprits"]] == [
        ("n0", 0, "GPU-eb00"),
        ("n1", 2, "GPU-eb02"),
    ]
    assert incident["opened_at"] == 101.0
    assert 60 <= incident["detected_after_s"] <= 70
    assert incident["decisions"][0] | {"reason": ""} == {
        "action": "none", "verdict": "allowed", "by": "filesystem_outage", "reason": "", "exclude": [], "outcome": None,
        "rule": "what is shipped for filesystem_outage", "ladder": [],
    }  # fmt: skip
    assert "2 lines skipped: no whole JSON in it (lines 13, 97)" in result.stderr
    assert "10 lines of 214 skipped in all" in result.stderr


def test_several_traces_are_replayed_each_by_itself() -> None:
    result = run("--json", OUTAGE, TRACES / "filesystem_stall.jsonl", OUTAGE)
    found = [(Path(i["trace"]).stem, i["id"]) for i in json.loads(result.stdout)["incidents"] if i["state"] == "firing"]
    assert [name for name, _ in found] == ["filesystem_outage", "filesystem_stall", "filesystem_outage"]
    assert len({number for _, number in found}) == 3


def test_where_little_could_be_used_nothing_found_says_so(tmp_path: Path) -> None:
    file = tmp_path / "reversed"
    no_ranks = OUTAGE.read_bytes().replace(b'"rank":', b'"no_rank":')
    file.write_bytes(b"\n".join(reversed(no_ranks.splitlines())))
    result = run(file)
    assert result.exit_code == 2
    assert "of 202 lines used, nothing found in those." in result.stdout
    assert "the time goes back" in result.stderr
    assert "too much was skipped to say that nothing is wrong" in result.stderr


def test_parts_of_a_trace_in_the_wrong_order_are_no_trace_in_which_nothing_is_wrong(tmp_path: Path) -> None:
    lines = (TRACES / "irregular.jsonl").read_bytes().splitlines()
    file = tmp_path / "swapped"
    file.write_bytes(b"\n".join(lines[len(lines) // 2 :] + lines[: len(lines) // 2]))
    assert run(file).exit_code == 2


def test_a_few_skipped_lines_of_a_healthy_trace_are_no_reason_for_doubt(tmp_path: Path) -> None:
    file = tmp_path / "torn"
    file.write_bytes((TRACES / "irregular.jsonl").read_bytes() + b'{"t": 12, "kind": "pr')
    result = run(file)
    assert (result.exit_code, "too much was skipped" in result.stderr) == (0, False)


def test_packed_traces_and_standard_input_are_read(tmp_path: Path) -> None:
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(OUTAGE.read_bytes()))
    plain = json.loads(run("--json", OUTAGE).stdout)
    assert json.loads(run("--json", packed).stdout) == plain
    assert json.loads(run("--json", "-", stdin=OUTAGE.read_bytes()).stdout) == plain


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b broken", gzip.compress(OUTAGE.read_bytes(), mtime=0)[:500], b"a,b,c\n1,2,3\n", b"\x00" * 99]
)
def test_a_file_that_is_no_trace_ends_with_a_sentence_and_code_2(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "strange"
    file.write_bytes(content)
    result = run("--json", file)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["incidents"] == []
    assert str(file) in result.stderr
    assert "Traceback" not in result.stderr


def test_cli_replay_reports_unreadable_files_and_replays_the_others(tmp_path: Path) -> None:
    result = run("--json", tmp_path / "missing", tmp_path, OUTAGE)
    assert result.exit_code == 2
    assert [i["kind"] for i in json.loads(result.stdout)["incidents"]] == ["filesystem_outage"]
    assert "No such file" in result.stderr
    assert "Is a directory" in result.stderr


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_no_trace_in_which_nothing_was_found(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty").write_bytes(content)
    result = run(tmp_path / "empty")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is empty; a trace has one JSON object a line" in result.stderr


def test_a_trace_has_to_be_named_and_a_wrong_configuration_is_refused(tmp_path: Path) -> None:
    assert run().exit_code == 2
    (tmp_path / "config.yaml").write_text("mode: maybe")
    result = run("--config", tmp_path / "config.yaml", OUTAGE)
    assert result.exit_code == 2
    assert "mode" in result.stderr


def test_the_configuration_decides_as_in_the_service(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("detectors: {filesystem_stall: {blocked_for: 2min}}")
    assert run("--config", tmp_path / "config.yaml", OUTAGE).exit_code == 0


def test_words_of_a_trace_cannot_drive_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(OUTAGE.read_bytes().replace(b"main_log.txt", b"main\\u001b[2Jlog"))
    result = run(file)
    assert result.exit_code == 1
    assert "\x1b" not in result.output
