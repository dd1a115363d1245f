"""`status --watch`: what is drawn, on a real terminal and in a pipe; and what shells complete."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_watchdog.cli import status as command
from slurm_watchdog.model.documents import Status
from tests.builders.cli import HOSTILE, FakeController, job, status

PROGRAM = [str(Path(sys.executable).with_name("slurm-watchdog"))]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    fake = FakeController(tmp_path / "c.sock")
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def _no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def parse(document: dict[str, Any]) -> Status:
    return msgspec.convert(document, Status)


def jobs(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [job(job_id=str(number), **each) for number, each in enumerate(changes)]


def drawn(document: dict[str, Any], height: int = 30, width: int = 140) -> str:
    return "\n".join(command.frame(parse(document), width, height, "note"))


OPEN = {
    "id": "7f3a99", "kind": "collective_hang", "state": "firing", "severity": "critical", "job_id": "4711", "opened_at": 820.0,
    "summary": "Rank 3 waits.",
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((), ""),
        ((4.0,), "▁"),
        ((4.0, 4.1, 4.05), "▁▁▁"),  # noise is flat
        ((1.0, 2.0, 3.0, 8.0), "▁▂▃█"),
        ((5.0, 5.0, 10.0, 10.0), "▁▁██"),
        ((1.0, float("nan"), float("inf"), 2.0), "▁█"),
        ((0.0, 0.0), "▁▁"),
    ],
)
def test_a_sparkline_shows_changes_and_no_noise(values: tuple[float, ...], line: str) -> None:
    assert command.sparkline(values) == line


def test_jobs_in_trouble_come_first_then_those_near_their_limit() -> None:
    rows = jobs({}, {"progress_age_s": 55.0}, {"ranks_alive": 7}, {"progress_age_s": 90.0}, {"progress_age_s": None})
    assert re.findall(r"^(\d) +train", drawn(status(jobs=rows)), re.MULTILINE) == ["3", "2", "1", "0", "4"]
    ranked = parse(status(jobs=rows)).jobs
    assert [command.style_of(each) for each in ranked] == ["", "yellow", "red", "red", ""]


def test_the_screen_has_incidents_jobs_with_their_curves_and_nodes() -> None:
    document = status(
        jobs=jobs({"step_times_s": [4.0] * 10 + [8.0] * 10, "progress_age_s": 30.0}),
        nodes={"reporting": ["n1", "n2"], "silent": ["n3", "n4"]},
        open=[OPEN],
        incidents={"firing": 3, "pending": 1, "resolved": 0},
    )
    text = drawn(document)
    assert re.search(r"- Rank 3 waits. \(for [\d.]+ d: slurm-watchdog show 7f3a99\)", text)
    assert "More: slurm-watchdog incidents" in text
    assert "▁" * 10 + "█" * 10 in text
    assert "2 nodes reporting, 2 silent: n[3-4]" in text


@pytest.mark.parametrize("height", [12, 24, 50])
def test_the_screen_is_never_higher_than_the_terminal(height: int) -> None:
    document = status(
        jobs=jobs(*[{}] * 500), open=[{**OPEN, "id": f"i{n}"} for n in range(20)],
        incidents={"firing": 5000, "pending": 0, "resolved": 0}, nodes={"reporting": [f"n{n}" for n in range(10_000)], "silent": []},
    )  # fmt: skip
    text = drawn(document, height, 100)
    assert len(text.splitlines()) <= height
    assert re.search(r"and \d+ jobs more", text)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_hostile_names_move_no_cursor_and_break_no_line() -> None:
    plain = drawn(status(jobs=[job(user="x", phase="y")], open=[OPEN]))
    text = drawn(status(jobs=[job(user=HOSTILE, phase=HOSTILE)], open=[{**OPEN, "summary": HOSTILE, "kind": HOSTILE}]))
    assert len(text.splitlines()) == len(plain.splitlines())
    for bad in ("\x1b", "\x9b", "\r", "\u202e", "\u200b", "\x07"):
        assert bad not in text
    assert "[red]x[/red]" in text


# ------------------------------------------------------------------------------------------------ for real


def test_on_a_terminal_it_draws_until_ctrl_c_and_leaves_the_screen_as_it_was(
    controller: FakeController,
) -> None:
    controller.answers["GET", "/v1/status"] = status(
        level="critical", open=[OPEN], incidents={"firing": 1, "pending": 0, "resolved": 0}
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="120", LINES="30")
        os.execv(PROGRAM[0], [*PROGRAM, "status", "--watch", "--every", "0.2", "--socket", str(controller.path)])
    seen, deadline = b"", time.monotonic() + 300
    while len(controller.requests) < 4:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    code = None
    while code is None:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:
                pass
        done, state = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(state) if done else None
    os.close(terminal)
    assert code == 2
    assert b"Rank 3 waits." in seen
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_pipe_it_is_plain_text_or_a_document_a_line(controller: FakeController, as_json: bool) -> None:
    controller.answers["GET", "/v1/status"] = status()
    more = ["--json"] if as_json else []
    process = subprocess.Popen(
        [*PROGRAM, "status", "--watch", "--every", "0.2", "--socket", str(controller.path), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3 if as_json else 9)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=180)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    if as_json:
        assert all(json.loads(line)["mode"] == "observe" for line in lines)
    else:
        assert [line for line in lines if line.startswith("OK: 1 job watched")] == [
            lines[0],
            lines[4],
            lines[8],
        ]
        assert "\x1b" not in "".join(lines)


def test_a_reader_that_leaves_ends_it_without_a_traceback(controller: FakeController) -> None:
    controller.answers["GET", "/v1/status"] = status()
    command = f"{' '.join(PROGRAM)} status --watch --every 0.2 --socket {controller.path} | head -1; exit $PIPESTATUS"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=180)
    assert done.stdout.startswith("OK")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_controller_that_goes_away_is_unknown_and_watched_on(tmp_path: Path) -> None:
    fake = FakeController(tmp_path / "c.sock")
    fake.answers["GET", "/v1/status"] = status()
    process = subprocess.Popen(
        [*PROGRAM, "status", "--watch", "--every", "0.2", "--socket", str(fake.path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("OK")
        fake.close()
        deadline = time.monotonic() + 300
        while "UNKNOWN: No controller listens" not in process.stdout.readline():
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 3
    finally:
        process.kill()


# ------------------------------------------------------------------------------------------------ completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_their_completion_from_the_program_itself(shell: str) -> None:
    environment = os.environ | {"_SLURM_WATCHDOG_COMPLETE": f"{shell}_source"}
    done = subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, timeout=180)
    if shell == "bash" and "Bash version" in done.stderr:
        pytest.skip("click wants bash 4.4 or newer")
    assert "_slurm_watchdog_completion" in done.stdout


def test_commands_and_options_are_completed() -> None:
    for words, number, wanted in (
        ("slurm-watchdog sta", 1, "status"),
        ("slurm-watchdog status --wa", 2, "--watch"),
    ):
        environment = os.environ | {
            "_SLURM_WATCHDOG_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number),
        }  # fmt: skip
        done = subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, timeout=180)
        assert done.stdout.split() == [f"plain,{wanted}"]


def test_forty_columns_show_what_matters_most_and_break_no_line() -> None:
    many = jobs(*({"step_times_s": [4.0] * 24} for _ in range(30)))
    incident = {**OPEN, "summary": "rank 3 on node0002 waits for its data loader. " * 5}
    shown = drawn(status(jobs=many, open=[incident]), 20, 40)
    lines = shown.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 40
    assert re.search(r"JOB .*STATE", shown) and "CHECKPOINT" not in shown
    assert "rank 3 on node0002" in " ".join(shown.split())


def test_a_hundred_columns_show_the_whole_sentence_of_an_incident() -> None:
    sentence = (
        "Job 7 hangs after step 120: no step for 61 s (limit 60 s); rank 3 (pid 4711 on node0002) waits for its lock"
    )
    shown = drawn(status(jobs=jobs({}), open=[{**OPEN, "summary": sentence}]), 30, 100)
    assert sentence in " ".join(shown.split())
