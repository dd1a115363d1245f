"""Following logs: lines over the borders of reads, rotation, truncation, bars, floods, old lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchdog.agent.tail import MAX_READ, Lines, Tail, condense, follow, parse_tracker


def steps(items: list[dict[str, Any]]) -> list[int | None]:
    return [item["step"] for item in items]


class Log:
    """A log file, and the tail that follows it."""

    def __init__(self, path: Path):
        self.path = path
        self.path.touch()
        self.tail = Tail(str(path))
        self.now = 1000.0

    def write(self, text: str | bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    def read(self, wall: float | None = None) -> list[dict[str, Any]]:
        self.now += 5
        return self.tail.read(self.now, wall if wall is not None else self.path.stat().st_mtime)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path / "x.log")
    log.read()
    return log


def test_a_line_that_comes_in_pieces(log: Log) -> None:
    log.write("step 1/100\nste")
    assert steps(log.read()) == [1]
    log.write("p 2/1")
    assert steps(log.read()) == []
    log.write("00\n")
    assert steps(log.read()) == [2]


def test_growth_is_dated(log: Log) -> None:
    log.write("PULSE\n")
    log.read()
    assert log.tail.grown_at == log.now
    log.read()
    assert log.tail.grown_at == log.now - 5


def test_the_end_of_an_old_file_is_no_fresh_progress(tmp_path: Path) -> None:
    log = Log(tmp_path / "x.log")
    log.write(
        "OSError: [Errno 28] No space left on device\n" + "".join(f"step {n}/100\n" for n in range(1, 50))
    )
    log.write("Traceback (most recent call last):\n")
    items = log.read(wall=log.path.stat().st_mtime + 3600)
    assert [(item["kind"], item["step"], round(item["age_s"])) for item in items] == [
        ("progress", 49, 3600),
        ("error", None, 3600),
    ]
    assert log.tail.grown_at == pytest.approx(log.now - 3600)


def test_only_the_end_of_a_large_file_is_read_at_first(tmp_path: Path) -> None:
    log = Log(tmp_path / "x.log")
    log.write("step 7/9\n" + "x" * 99 + "\n" * 100_000)
    assert log.read() == []
    log.write("step 8/9\n")
    assert steps(log.read()) == [8]


def test_a_run_begins_in_the_middle_of_a_file_that_an_earlier_run_wrote(tmp_path: Path) -> None:
    log = Log(tmp_path / "x.log")
    log.write("step 90/100\nTraceback (most recent call last):\n")
    log.tail.start = log.path.stat().st_size
    log.write("step 51/100\n")
    assert [(item["kind"], item["step"]) for item in log.read()] == [("progress", 51)]


def test_rotation_loses_nothing(log: Log) -> None:
    log.write("step 1/100\n")
    log.read()
    log.write("step 2/100\n")
    os.rename(log.path, f"{log.path}.1")
    log.write("step 3/100\n")
    assert steps(log.read()) == [2, 3]


def test_a_truncated_file_is_read_from_its_beginning(log: Log) -> None:
    log.write("step 1/100\nstep 2/100\n")
    log.read()
    os.truncate(log.path, 0)
    log.write("step 1/100\n")
    assert steps(log.read()) == [1]


def test_a_redrawn_bar_counts_when_its_count_rises(log: Log) -> None:
    log.write("\r 1%| | 1/100 [00:01<01:39, 1.0s/it]" * 3 + "\r 2%| | 2/100 [00:02<01:38, 1.0s/it]\r\n")
    assert steps(log.read()) == [1, 2]


def test_bytes_that_are_no_text(log: Log) -> None:
    log.write(b"\xff\xfe\x00 step 1/100\n\x80\nstep 2/100\n")
    assert steps(log.read())[-1] == 2


def test_a_line_of_megabytes_costs_no_memory(log: Log) -> None:
    for _ in range(3):
        log.write("x" * 900_000)
        log.read()
        assert len(log.tail.lines.pending) <= 70_000
    log.write("\nstep 1/100\n")
    assert steps(log.read()) == [1]


def test_a_flood_keeps_the_first_error_and_the_newest_step(log: Log) -> None:
    log.write("OSError: [Errno 28] No space left on device\n" + "y" * 80 + "\n")
    log.write(("y" * 99 + "\n") * 40_000 + "step 9/100\n")
    items = log.read()
    assert items[0]["pattern"] == "disk_full"
    assert items[-1]["step"] == 9
    assert log.tail.dropped >= 4_000_000 - MAX_READ


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        Tail(str(tmp_path / "fifo")).read(1.0, 1.0)


def test_a_missing_file_is_said_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("step 1/9\n")
    answer = follow(
        {"files": [["4", f"{tmp_path}/none", None], ["4", f"{tmp_path}/a.log", None]], "trackers": []}, {}
    )
    assert answer["files"][0]["error"].startswith("ENOENT: No such file or directory")
    assert answer["files"][1]["error"] is None
    assert steps(answer["files"][1]["events"]) == [1]


def test_a_tracker_is_told_when_its_step_changes(tmp_path: Path) -> None:
    path, state = tmp_path / "latest_checkpointed_iteration.txt", dict[str, Any]()
    args = {"files": [], "trackers": [["4", str(path)]]}
    assert follow(args, state)["trackers"] == []
    path.write_text("100")
    assert steps(follow(args, state)["trackers"]) == [100]
    assert follow(args, state)["trackers"] == []
    path.write_text("200\n")
    assert steps(follow(args, state)["trackers"]) == [200]


@pytest.mark.parametrize(
    ("text", "step"),
    [("1200", 1200), ("global_step1200\n", 1200), ("iter_0001200", 1200), ("release", None), ("", None)],
)
def test_forms_of_trackers(text: str, step: int | None) -> None:
    assert parse_tracker(text) == step


def test_of_much_progress_the_last_and_an_even_choice_stay() -> None:
    items = [{"kind": "progress", "step": n} for n in range(1000)] + [{"kind": "error", "step": None}]
    kept, dropped = condense(items)
    assert len(kept) == 51
    assert kept[-2]["step"] == 999
    assert kept[0]["step"] == 19
    assert dropped == 950


@given(st.lists(st.binary(max_size=20)))
def test_lines_do_not_depend_on_how_the_bytes_were_cut(chunks: list[bytes]) -> None:
    whole, pieces = Lines(), Lines()
    data = b"".join(chunks)
    expected = whole.feed(data + b"\n")
    found = [line for chunk in chunks for line in pieces.feed(chunk)] + pieces.feed(b"\n")
    assert found == expected
