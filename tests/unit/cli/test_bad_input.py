"""What a tired person types, and what a broken machine answers: a sentence and a documented code, never a traceback."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.builders.cli import FakeController, run

OUTPUT_LOST = 3


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The program as a process of its own, for what concerns its standard output."""
    argv = [sys.executable, "-m", "slurm_watchdog.cli.main", *words]
    with open("/dev/full", "wb") as full:
        output = full if environment.pop("to", "") == "full" else subprocess.PIPE
        return subprocess.run(
            argv, stdout=output, stderr=subprocess.PIPE, env={**os.environ, **environment}, timeout=60, check=False
        )


def test_output_that_cannot_be_written_is_a_sentence_and_not_a_result(tmp_path: Path) -> None:
    done = program("scan-log", "/dev/null", to="full")
    assert (done.returncode, done.stderr) == (OUTPUT_LOST, b"The output cannot be written: No space left on device.\n")


def test_a_terminal_that_lacks_a_character_gets_another_one(tmp_path: Path) -> None:
    done = program("run", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, b"torchrun" in done.stdout, done.stderr) == (0, True, b"")


@pytest.mark.parametrize(
    "words",
    [
        ("status", "--every", "nan"),
        ("group-stacks", "--since-last-step", "nan", "/dev/null"),
        ("group-stacks", "--typical-step", "inf", "/dev/null"),
        ("restart", "4711", "--exclude", "n[1-999999999]"),
        ("drain", "n[1-99999999]", "--reason", "x"),
        ("silence", "--reason", "all of them"),
        ("silence", "--for", "4h"),
        ("incidents", "--kind", "colective_hang"),
        ("incidents", "--job", "my-job"),
        ("report", "--from", "2026-02-30"),
        ("report", "--from", "0001-01-01"),
        ("diagnose", "/nonexistent/dumps"),
        ("diagnose", "x" * 400),
    ],
)
def test_what_cannot_be_meant_is_wrong_usage(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(*words, SLURM_WATCHDOG_SOCKET=str(tmp_path / "none"))
    assert (done.exit_code, done.stderr.count("Error: ")) == (2, 1), done.output


@pytest.mark.parametrize("time", ["nan", "inf", "-1", "9" * 20, ""])
def test_a_time_that_no_log_was_seen_at_is_refused(tmp_path: Path, time: str) -> None:
    done = run("scan-log", "--at", time, "/dev/null")
    assert (done.exit_code, "not a time" in done.stderr) == (2, True)


def test_a_misspelt_kind_gets_a_suggestion(tmp_path: Path) -> None:
    assert "did you mean 'collective_hang'?" in run("incidents", "--kind", "colective_hang").stderr


def test_silences_are_listed_without_options(tmp_path: Path) -> None:
    fake = FakeController(tmp_path / "c.sock")
    fake.answers["GET", "/v1/silences"] = {"silences": []}
    try:
        assert "Nothing is silenced" in run("silence", socket=fake.path).stdout
    finally:
        fake.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty: it is not a journal"),
        (b"no database, but text that is long enough to have a header of one" * 20, "cannot be read: file is not a database"),
    ],
)  # fmt: skip
def test_what_is_no_journal_is_not_taken_for_one_without_incidents(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "journal.sqlite"
    if content is not None:
        file.write_bytes(content)
    done = run("incidents", "--journal", str(tmp_path), "--json")
    assert (done.exit_code, words in done.stderr, words in json.loads(done.stdout)["error"]) == (3, True, True)


def test_a_database_of_another_program_is_no_journal(tmp_path: Path) -> None:
    file = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE incidents (id TEXT)")
    done = run("incidents", "--journal", str(file))
    assert (done.exit_code, "no journal of slurm-watchdog" in done.stderr) == (3, True)


def test_a_home_of_an_unknown_user_is_no_traceback() -> None:
    done = run("incidents", "--journal", "~nobody-has-this-name/x")
    assert (done.exit_code, "No such file" in done.stderr) == (3, True)


def test_a_user_without_a_home_has_no_runs() -> None:
    """A container may run as a number that no passwd has."""
    if os.geteuid() != 0:
        pytest.skip("only root takes another number")
    code = "import os; from slurm_watchdog.standalone.own_runs import home_directory, read_runs; os.setuid(4294000); "
    code += "print(read_runs(home_directory()))"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, timeout=60, check=False, cwd="/"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[]\n", b"")


def test_a_file_of_a_date_that_does_not_exist_is_scanned(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text("step 1\n")
    try:
        os.utime(file, (10**13, 10**13))
    except OSError:
        pytest.skip("this filesystem has no such dates")
    assert run("scan-log", str(file)).exit_code == 0


def test_a_name_that_is_no_text_is_json_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"dm\xffesg")
    file.write_text("[1.0] Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB\n")
    done = run("scan-log", "--kernel", "--json", str(file))
    assert (done.exit_code, len(json.loads(done.stdout)["lines"])) == (1, 1)


def test_what_run_cannot_start_is_said_by_its_kind(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.touch(mode=0o644)
    assert "not executable" in run("run", "--", str(script)).stderr
    assert "is not an option of `slurm-watchdog run`" in run("run", "--max-restart", "2", "--", "true").stderr
    assert "no program 'nosuch'" in run("run", "--", "nosuch").stderr


def test_a_run_does_not_close_a_directory_that_others_use(tmp_path: Path) -> None:
    shared = tmp_path / "project"
    shared.mkdir(mode=0o755)
    (shared / "train.py").touch()
    done = run("run", "--no-page", "--directory", str(shared), "--", "true", SLURM_JOB_ID="")
    assert (done.exit_code, "has other files" in done.stderr) == (2, True)
    assert shared.stat().st_mode & 0o777 == 0o755


def test_closed_streams_are_empty_ones() -> None:
    words = [sys.executable, "-c", "from slurm_watchdog.cli.main import main; main()", "scan-log", "-"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&-', "sh", *words], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (2, b"")
