"""Following logs: lines over the borders of reads, rotation, truncation, bars, floods, old lines."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.children.answers import FollowedLogs
from slurm_watchdog.agent.children.requests import Follow, WorkerState
from slurm_watchdog.agent.logs import log_file, position
from slurm_watchdog.agent.logs.follow import MAX_ANSWER_EVENTS, FollowLimits, FollowMemory, expand, follow
from slurm_watchdog.agent.logs.log_file import LogFollower, condense, shown
from slurm_watchdog.agent.logs.position import LineBuffer
from slurm_watchdog.agent.logs.step_rows import StepRows, make_event
from slurm_watchdog.controller.state.progress_clock import lines_of
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.line_scan import ShapeMemory, scan


def steps(items: Iterable[Event]) -> list[int | None]:
    return [each.step for item in items for each in lines_of(item)]


class Log:
    """A log file, and the tail that follows it."""

    def __init__(self, path: Path):
        self.path = path
        self.path.touch()
        self.tail = LogFollower(str(path))
        self.now = 1000.0

    def write(self, text: str | bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    def read(self, wall: float | None = None) -> list[Event]:
        self.now += 5
        if wall is None:
            wall = self.path.stat().st_mtime if self.path.exists() else self.now
        self.tail.refresh(self.now, wall, {})
        while self.tail.has_more:
            self.tail.read(self.now, wall)
        items, self.left_out = self.tail.drain_events()
        return items


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path / "x.log")
    log.read()
    return log


def test_of_a_file_that_says_it_is_empty_nothing_is_read() -> None:
    tail = LogFollower(
        "/proc/version"
    )  # others, such as /proc/kmsg, give each line once: to us instead of to whom it was for
    tail.refresh(1000.0, 0.0, {})
    assert not tail.has_more
    assert tail.place is not None
    assert tail.place.position == 0
    tail.close()


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
    log.write("OSError: [Errno 28] No space left on device\n" + "".join(f"step {n}/100\n" for n in range(1, 50)))
    log.write("Traceback (most recent call last):\n")
    items = log.read(wall=log.path.stat().st_mtime + 3600)
    assert [(item.kind, item.step, round(item.age_s)) for item in items] == [
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
    assert [(item.kind, item.step) for item in log.read()] == [("progress", 51)]


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


def test_each_loss_beside_the_same_rounded_epoch_is_read(log: Log) -> None:
    log.write("".join(f"{{'loss': {loss}, 'learning_rate': 5e-05, 'epoch': 0.01}}\n" for loss in (2.5, 2.4, 2.6)))
    assert [each.loss for item in log.read() for each in lines_of(item)] == [2.5, 2.4, 2.6]


def test_bytes_that_are_no_text(log: Log) -> None:
    log.write(b"\xff\xfe\x00 step 1/100\n\x80\nstep 2/100\n")
    assert steps(log.read())[-1] == 2


def test_a_line_of_megabytes_costs_no_memory(log: Log) -> None:
    for _ in range(3):
        log.write("x" * 900_000)
        log.read()
        assert log.tail.place is not None
        assert len(log.tail.place.lines.pending) <= position.MAX_PENDING
    log.write("\nstep 1/100\n")
    assert steps(log.read()) == [1]


def test_a_missing_file_is_said_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("step 1/9\n")
    answer = follow(Follow([("4", f"{tmp_path}/none", None), ("4", f"{tmp_path}/a.log", None)]), WorkerState())
    assert str(answer.files[0].error).startswith("ENOENT: No such file or directory")
    assert answer.files[1].error is None
    assert steps(answer.files[1].events) == [1]


def event(kind: EventKind, step: int | None = None, pattern: str | None = None, rank: int | None = None) -> Event:
    return Event(kind=kind, job_id="", source="", age_s=0.0, step=step, pattern=pattern, rank=rank)


def test_of_much_progress_the_last_and_an_even_choice_stay() -> None:
    items = [event(EventKind.PROGRESS, n) for n in range(1000)] + [event(EventKind.ERROR)]
    kept, dropped = condense(items)
    assert len(kept) == 51
    assert kept[-2].step == 999
    assert kept[0].step == 19
    assert dropped == 950


def test_of_many_errors_the_first_of_each_pattern_stays_wherever_it_stands() -> None:
    items = [event(EventKind.ERROR, n, "nccl_watchdog") for n in range(1000)]
    items[700] = event(EventKind.ERROR, 700, "disk_full")
    kept, dropped = condense(items)
    assert (len(kept), dropped) == (50, 950)
    assert [item.step for item in kept] == [*range(48), 700, 999]


def test_of_a_cascade_as_many_ranks_as_possible_stay() -> None:
    items = [event(EventKind.ERROR, n, "nccl_error", n // 20) for n in range(1000)]
    kept, _ = condense(items)
    assert {item.rank for item in kept} >= set(range(49))
    assert [item.step for item in kept] == sorted(item.step for item in kept)


# -- what may happen to a file ---------------------------------------------------------------------------------


def test_the_rest_of_a_rotated_file_is_read_with_its_last_line(log: Log) -> None:
    log.write("step 1/100\n")
    log.read()
    log.write("step 2/100\nstep 3/100")
    os.rename(log.path, f"{log.path}.1")
    log.write("step 4/100\n")
    assert steps(log.read()) == [2, 3, 4]


def test_a_file_copied_and_truncated_loses_nothing_that_comes_after(log: Log) -> None:
    log.write("step 1/100\n" * 50)
    log.read()
    os.truncate(log.path, 0)
    assert steps(log.read()) == []
    log.write("step 60/100\n")
    assert steps(log.read()) == [60]


def test_a_file_truncated_and_grown_beyond_the_old_end_between_two_looks_is_read_anew(log: Log) -> None:
    log.write("begun at 10:00\nstep 80/100\n")
    log.read()
    os.truncate(log.path, 0)
    log.write("begun at 11:30\n" + "".join(f"step {n}/100\n" for n in range(1, 9)))
    (row,) = log.read()
    assert (row.lines, steps([row])) == (8, [1, 6, 7, 8])


def test_a_file_rewritten_to_the_same_size_is_read_anew(log: Log) -> None:
    log.write("run a\nstep 8/9\n")
    log.read()
    with open(log.path, "r+b") as file:
        file.write(b"run b\nstep 1/9\n")
    os.utime(log.path, ns=(1, 1))
    assert steps(log.read()) == [1]


def test_a_file_that_was_only_touched_says_nothing_twice(log: Log) -> None:
    log.write("step 8/9\n")
    log.read()
    os.utime(log.path, ns=(1, 1))
    assert log.read() == []
    assert log.tail.grown_at == log.now - 5


def test_bytes_that_are_mended_just_before_our_place_are_no_new_file(log: Log) -> None:
    log.write("x" * 1000 + "\nstep 7/9\n")
    log.read()
    with open(log.path, "r+b") as file:
        file.seek(900)
        file.write(b"\0" * 50)
    log.write("step 8/9\n")
    assert steps(log.read()) == [8]
    log.write("step 9/9\n")
    assert steps(log.read()) == [9]


def test_a_writer_that_goes_on_at_its_old_place_after_truncation_leaves_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with open(path, "wb", buffering=0) as writer:
        log = Log(path)
        writer.write(b"step 7/9\n" * 1000)
        log.read()
        writer.write(b"step 7/9\n" * 1000)
        log.read()
        os.truncate(path, 0)
        writer.write(b"step 8/9\n")
        assert path.stat().st_size == 18_009
        assert steps(log.read()) == [8]


def test_zeros_at_the_end_are_not_taken_for_text_until_more_follows(log: Log) -> None:
    """On NFS, what another node is writing shows as zeros until it has arrived."""
    log.write(b"step 1/9\nst" + b"\0" * 20)
    assert steps(log.read()) == [1]
    assert log.tail.lag_bytes == 20
    with open(log.path, "r+b") as file:
        file.seek(11)
        file.write(b"ep 2/9\nstep 3/9\nx\n\n\n")
    assert steps(log.read()) == [2, 3]
    assert log.tail.lag_bytes == 0


def test_a_hole_in_the_middle_costs_no_line(log: Log) -> None:
    log.write("step 1/9\n")
    log.read()
    os.truncate(log.path, 3_000_000)
    log.write("step 2/9\n")
    assert steps(log.read()) == [2]


def test_a_file_moved_away_and_back_is_not_read_twice(log: Log) -> None:
    log.write("step 1/9\n")
    log.read()
    os.rename(log.path, f"{log.path}.away")
    assert log.read() == []
    assert (log.tail.error or "").startswith("ENOENT")
    assert log.tail.fd < 0
    os.rename(f"{log.path}.away", log.path)
    log.write("step 2/9\n")
    assert steps(log.read()) == [2]
    assert log.tail.error is None


def test_what_was_written_before_a_file_was_removed_is_read(log: Log) -> None:
    log.write("step 1/9\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device")
    os.unlink(log.path)
    assert [item.pattern for item in log.read()] == ["step_of", "traceback", "disk_full"]
    log.write("step 1/9\n")
    assert steps(log.read()) == [1]


def test_a_link_that_points_elsewhere_is_followed(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"this is {name}\n")
    (tmp_path / "current").symlink_to("a")
    log = Log(tmp_path / "current")
    log.read()
    log.write("step 1/9\n")
    os.unlink(log.path)
    log.path.symlink_to("b")
    log.write("step 2/9\n")
    assert steps(log.read()) == [1, 2]


def test_a_copy_put_in_place_of_the_file_is_the_same_text(log: Log) -> None:
    log.write("begun at 10:00\nstep 1/9\n")
    log.read()
    copy = log.path.with_suffix(".new")
    copy.write_bytes(log.path.read_bytes() + b"step 2/9\n")
    os.rename(copy, log.path)
    assert steps(log.read()) == [2]


@contextmanager
def somebody() -> Iterator[None]:
    """As a user who is not root, for whom permissions count."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_file_that_may_not_be_read_yet_is_read_when_it_may(tmp_path: Path) -> None:
    os.chmod(tmp_path.parent.parent.parent, 0o755)
    for directory in (tmp_path.parent.parent, tmp_path.parent, tmp_path):
        os.chmod(directory, 0o755)
    log = Log(tmp_path / "x.log")
    log.write("step 1/9\n")
    os.chmod(log.path, 0)
    with somebody():
        assert log.read() == []
        assert (log.tail.error or "").startswith("EACCES: Permission denied")
    os.chmod(log.path, 0o644)
    with somebody():
        assert steps(log.read()) == [1]
    log.write("step 2/9\n")
    with somebody():
        assert steps(log.read()) == [2]


def test_a_stale_handle_is_opened_anew_and_nothing_is_read_twice(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write("step 1/9\n")
    log.read()
    log.write("step 2/9\n")

    def stale(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("slurm_watchdog.agent.logs.log_file.os.pread", stale)
        assert log.read() == []
    assert log.tail.error == "ESTALE: Stale file handle"
    assert steps(log.read()) == [2]
    assert log.tail.error is None


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a socket", "a character device"])
def test_what_is_no_regular_file_is_never_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.log"
    log = Log(path)
    log.write("step 1/9\n")
    log.read()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "a FIFO":
            os.mkfifo(path)
        elif kind == "a directory":
            path.mkdir()
        elif kind == "a socket":
            listener.bind(str(path))
        else:
            path.symlink_to("/dev/zero")
        assert log.read() == []
        assert log.tail.error == f"it is {kind}, not a regular file"
        assert log.tail.fd < 0


# -- how lines are written -------------------------------------------------------------------------------------


def test_windows_line_ends_cut_in_two(log: Log) -> None:
    log.write(b"step 1/9\r")
    assert steps(log.read()) == [1]
    log.write(b"\nstep 2/9\r\n")
    assert steps(log.read()) == [2]


def test_a_bar_of_many_kilobytes_without_a_line_feed(log: Log) -> None:
    for n in range(1, 2000):
        log.write(f"\r {n // 20}%|####      | {n}/2000 [00:01<01:39, 1.0s/it]")
    (row,) = log.read()
    assert (row.step, row.lines) == (1998, 1998)


def test_text_in_utf_16_reads_like_ascii(log: Log) -> None:
    log.write("step 1/9\nstep 2/9\n".encode("utf-16"))
    log.read()
    log.write("step 3/9\n".encode("utf-16-le"))
    assert steps(log.read()) == [3]


def test_the_last_words_of_a_program_may_lack_the_end_of_their_line(log: Log) -> None:
    log.write("Segmentation fault")
    assert log.read() == []
    log.now += log_file.QUIET_S
    assert [item.pattern for item in log.read()] == ["segmentation_fault"]
    assert log.read() == []
    log.write(" (core dumped)\nstep 1/9\n")
    assert steps(log.read()) == [1]


def test_the_last_bar_before_a_silence_counts_once_and_one_that_is_cut_does_not(log: Log) -> None:
    bar = "\r 62%|######    | {}/90 [00:10<00:05, 5.50it/s, loss=0.4]"
    log.write(bar.format(56) + bar.format(57))
    assert steps(log.read()) == [56]
    log.now += log_file.QUIET_S
    (last,) = log.read()
    assert (last.step, last.age_s >= log_file.QUIET_S) == (57, True)
    assert log.read() == []
    log.write(bar.format(58) + bar.format(59)[:-12])
    assert steps(log.read()) == [58], "57 was counted"
    log.now += 2 * log_file.QUIET_S
    assert log.read() == []


def test_a_number_that_is_cut_in_two_is_no_step(log: Log) -> None:
    log.write("loss: 0.5, step 12")
    log.read()
    log.now += 60
    assert log.read() == []
    log.write("34\n")
    assert steps(log.read()) == [1234]


# -- floods ----------------------------------------------------------------------------------------------------


def ask(state: WorkerState, *paths: Path, job: str = "4", **more: Any) -> FollowedLogs:
    taken = more.pop("taken", state.memory(FollowMemory).token)
    return follow(Follow([(job, str(path), None) for path in paths], taken=taken, **more), state)


def worker_with(limits: FollowLimits) -> WorkerState:
    state = WorkerState()
    state.memory(FollowMemory).limits = limits
    return state


def test_the_first_error_in_the_middle_of_a_flood_is_told_and_what_waits_is_counted(tmp_path: Path) -> None:
    path, state = tmp_path / "x.log", worker_with(FollowLimits(look_bytes=1 << 20))
    path.touch()
    ask(state, path)
    cascade = "".join(f"[rank{n % 64}]: Watchdog caught collective operation timeout {n}\n" for n in range(50_000))
    path.write_text(cascade + "OSError: [Errno 28] No space left on device\n" + cascade + "step 9/100\n")
    rows = [ask(state, path).files[0]]
    assert rows[0].lag_bytes == path.stat().st_size - rows[0].offset > 0
    assert rows[0].offset >= 1 << 20
    assert rows[0].growth_age_s < 5
    while rows[-1].lag_bytes:
        rows.append(ask(state, path).files[0])
    events = [event for row in rows for event in row.events]
    assert len(rows) >= 6
    assert {"nccl_watchdog", "disk_full", "step_of"} == {event.pattern for event in events}
    assert len(events) + sum(row.dropped for row in rows) == 100_002
    assert max(len(row.events) for row in rows) <= 51
    assert sum(row.skipped_bytes for row in rows) == 0


def test_far_behind_reading_goes_on_near_the_end_and_says_what_it_passed_over(log: Log) -> None:
    log.write("step 1/9\n")
    os.truncate(log.path, log_file.MAX_LAG)  # a hole: it takes no room on the disk
    log.write("\nstep 2/9\n")
    size = log.path.stat().st_size
    assert steps(log.read()) == [2]
    assert log.tail.skipped_bytes == size - log_file.KEPT_AFTER_SKIP
    assert log.tail.lag_bytes == 0


def test_a_flooded_file_does_not_starve_the_others(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.log" for n in range(4)]
    state = worker_with(FollowLimits(look_bytes=2 * log_file.READ))
    for path in paths:
        path.touch()
    ask(state, *paths)
    for path in paths[:3]:
        path.write_text("y" * 99 + "\n" + "x\n" * 1_000_000)
    paths[3].write_text("step 1/9\n")
    assert steps([e for _ in range(2) for e in ask(state, *paths).files[3].events]) == [1]
    offsets = [row.offset for row in ask(state, *paths).files[:3]]
    assert min(offsets) >= log_file.READ


def test_lines_that_waited_are_as_old_as_the_look_that_saw_them(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.touch()
    one = LogFollower(str(path))
    one.refresh(100.0, 100.0, {})
    path.write_text("x\n" * log_file.READ + "step 1/9\n" + "x\n" * log_file.READ)
    one.refresh(105.0, 105.0, {})
    one.read(105.0, 105.0)
    with open(path, "a") as file:
        file.write("x\n" * log_file.READ + "step 2/9\n")
    one.refresh(112.0, 112.0, {})
    while one.has_more:
        one.read(112.0, 112.0)
    assert [(steps([item]), item.age_s) for item in one.drain_events()[0]] == [([1, 2], 0.0)]
    assert one.grown_at == 112.0


def test_hundreds_of_files_give_an_answer_of_bounded_size(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.log" for n in range(300)]
    state = WorkerState()
    for path in paths:
        path.touch()
    ask(state, *paths)
    for path in paths:
        path.write_text("".join(f"step {n}/100\n" for n in range(1, 101)))
    answers = [ask(state, *paths).files]
    while any(row.lag_bytes for row in answers[-1]):
        answers.append(ask(state, *paths).files)
    assert all(sum(len(row.events) for row in rows) <= MAX_ANSWER_EVENTS for rows in answers)
    rows = [row for rows in answers for row in rows if row.events]
    assert [row.events[-1].step for row in rows] == [100] * 300
    assert sum(event.lines for row in rows for event in row.events) == 30_000
    assert sum(row.dropped for row in rows) == 0


# -- names -----------------------------------------------------------------------------------------------------


def test_one_file_under_two_names_is_counted_once(tmp_path: Path) -> None:
    out, err, link = tmp_path / "out", tmp_path / "err", tmp_path / "link"
    out.touch()
    os.link(out, err)
    link.symlink_to(out)
    state = WorkerState()
    ask(state, out, err, link)
    with open(out, "a") as file:
        file.write("step 1/9\n")
    rows = ask(state, out, err, link).files
    assert [steps(row.events) for row in rows] == [[1], [], []]
    assert [row.offset for row in rows] == [9, 9, 9]
    assert [row.error for row in rows] == [None, None, None]
    os.unlink(out)
    found = ask(state, out, err, link).files
    with open(err, "a") as file:
        file.write("step 2/9\n")
    found += ask(state, out, err, link).files
    assert [steps(row.events) for row in found] == [[], [], [], [], [2], []]


def test_a_file_known_by_its_new_name_goes_on_where_it_was_left(tmp_path: Path) -> None:
    """A program whose log was renamed writes on to it; its open descriptor shows the new name."""
    old, new, state = tmp_path / "x.log", tmp_path / "x.log.1", WorkerState()
    with open(old, "a", buffering=1) as writer:
        writer.write("begun\nstep 1/9\n")
        ask(state, old)
        os.rename(old, new)
        writer.write("step 2/9\n")
        assert steps(ask(state, old).files[0].events) == [2]
        writer.write("step 3/9\n")
        assert steps(ask(state, old, new).files[1].events) == [3]


def test_two_jobs_that_share_a_file_are_each_told(tmp_path: Path) -> None:
    path, state = tmp_path / "x.log", WorkerState()
    path.touch()
    files: list[tuple[str, str, int | None]] = [("4", str(path), None), ("5", str(path), None)]
    follow(Follow(files), state)
    path.write_text("step 1/9\n")
    assert [
        steps(row.events) for row in follow(Follow(files, taken=state.memory(FollowMemory).token), state).files
    ] == [
        [1],
        [1],
    ]


def test_what_an_answer_held_that_nobody_took_comes_again(tmp_path: Path) -> None:
    path, state = tmp_path / "x.log", WorkerState()
    path.touch()
    first = ask(state, path)
    path.write_text("step 1/9\n")
    late = ask(state, path, taken=first.token)
    assert steps(late.files[0].events) == [1]
    with open(path, "a") as file:
        file.write("step 2/9\n")
    again = ask(state, path, taken=first.token)
    assert steps(again.files[0].events) == [1, 2]
    assert ask(state, path, taken=again.token).files[0].events == ()


def test_files_that_are_no_longer_named_are_closed_and_forgotten(tmp_path: Path) -> None:
    path, state = tmp_path / "x.log", WorkerState()
    path.write_text("step 1/9\n")
    ask(state, path)
    before = len(os.listdir("/proc/self/fd"))
    ask(state)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert state.memory(FollowMemory).tails == state.memory(FollowMemory).closed == {}


def test_a_pattern_names_the_files_written_last_and_not_hidden_ones(tmp_path: Path) -> None:
    for rank in range(30):
        path = tmp_path / f"rank_{rank}" / "stdout.log"
        path.parent.mkdir()
        path.touch()
        os.utime(path, (1000 + rank, 1000 + rank))
    (tmp_path / ".rank_1").mkdir()
    (tmp_path / ".rank_1" / "stdout.log").touch()
    (tmp_path / "rank_x").touch()
    found = expand(f"{tmp_path}/rank_*/stdout.log")
    assert found == [f"{tmp_path}/rank_{rank}/stdout.log" for rank in range(29, 5, -1)]
    assert expand(f"{tmp_path}/rank_[12]/*.log") == [f"{tmp_path}/rank_{rank}/stdout.log" for rank in (2, 1)]
    assert expand(f"{tmp_path}/none/*") == []


def test_a_pattern_reads_only_so_many_names(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.log").touch()
    assert len(expand(f"{tmp_path}/*.log", max_entries=10)) == 10


def test_patterns_are_looked_up_every_so_often(tmp_path: Path) -> None:
    path, state = tmp_path / "log-0", WorkerState()
    globs = [("4", f"{tmp_path}/log-*")]
    assert ask(state, globs=globs).globs == (("4", f"{tmp_path}/log-*", ()),)
    path.touch()
    assert ask(state, globs=globs).globs == ()
    state.memory(FollowMemory).expanded["4", f"{tmp_path}/log-*"] -= FollowLimits().expand_every_s
    assert ask(state, globs=globs).globs == (("4", f"{tmp_path}/log-*", (str(path),)),)


@given(st.lists(st.binary(max_size=20)))
def test_lines_do_not_depend_on_how_the_bytes_were_cut(chunks: list[bytes]) -> None:
    whole, pieces = LineBuffer(), LineBuffer()
    data = b"".join(chunks)
    expected = whole.feed(data + b"\n")
    found = b"".join(pieces.feed(chunk) for chunk in [*chunks, b"\n"])
    assert [line for line in found.split(b"\n") if line] == [line for line in expected.split(b"\n") if line]


def test_a_loss_that_is_no_number_is_said_so_that_json_can_carry_it() -> None:
    lines = ("iteration 7/ 10 | lm loss: nan |", "iteration 8/ 10 | lm loss: 2.5 |", "iteration 9/ 10 |")
    items = [make_event(fact, 0.0) for line in lines if (fact := parse_line(line)) is not None]
    said = [(item.loss, item.loss_is_no_number) for item in items]
    assert said == [(None, True), (2.5, False), (None, False)]


# -- rows of progress ------------------------------------------------------------------------------------------


def row_of(lines: Iterable[str]) -> list[Event]:
    rows, found = StepRows(), list[Event]()
    for line in lines:
        fact = parse_line(line)
        assert fact is not None
        found += rows.add(fact, 0.0)
    return found + rows.close()


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        (["2", "9", "3", "4", "5", "6"], ["2", "4", "5", "6"]),
        (["2", "3", "nan", "nan", "nan", "nan", "nan"], ["2", "nan", "nan", "nan", "nan"]),
        (["nan", "2", "3", "nan", "2.5", "nan"], ["2", "nan", "2.5", "nan"]),
        (["nan", "1", "nan", "1", "nan", "nan", "1"], ["1", "nan", "nan", "1"]),
        (["1", "inf", "2"], ["1", "nan", "2"]),
    ],
)
def test_of_many_losses_a_row_has_the_newest_the_lowest_and_where_bad_ones_began(
    losses: list[str], kept: list[str]
) -> None:
    (row,) = row_of(f"iteration {at}/ 100 | lm loss: {loss} |" for at, loss in enumerate(losses, 1))
    seen = [float("nan") if each.loss_is_no_number else each.loss for each in lines_of(row)]
    assert str(seen) == str([float(each) for each in kept])
    assert row.lines == len(losses)


@pytest.mark.parametrize("each", [5, 10, 20])
@pytest.mark.parametrize("lines", [5, 47, 50, 51, 100])
def test_a_loss_that_comes_back_now_and_then_never_looks_like_one_that_lasts(each: int, lines: int) -> None:
    rows, memory, kept = StepRows(), ShapeMemory(steps_in_full=1, evenly=5), list[float]()
    for look in range(60):
        steps = range(look * lines + 1, (look + 1) * lines + 1)
        text = "".join(f"step {n}/100000 loss: {9 if n % each == 0 else 2}\n" for n in steps)
        memory.look = look
        events = [event for fact in scan(text.encode(), memory).facts for event in rows.add(fact, 0.0)]
        kept += [seen.loss or 0.0 for event in (*events, *rows.close()) for seen in lines_of(event)]
    assert 9.0 in kept and all(2.0 in run for run in zip(kept, kept[1:], kept[2:], strict=False))


@given(st.lists(st.sampled_from(["1", "2", "nan", "inf"]), min_size=1, max_size=40), st.integers(1, 9))
def test_three_bad_losses_in_a_row_of_what_is_kept_were_three_in_a_row(losses: list[str], cut: int) -> None:
    lines = [f"iteration {at}/ 100 | lm loss: {loss} |" for at, loss in enumerate(losses, 1)]
    kept = [each for at in range(0, len(lines), cut) for row in row_of(lines[at : at + cut]) for each in lines_of(row)]
    bad = [each.step or 0 for each in kept if each.loss_is_no_number]
    for first, last in zip(bad, bad[2:], strict=False):
        places = [each.step for each in kept if first <= (each.step or 0) <= last]
        if len(places) == 3:  # nothing good was kept between them
            assert all(loss in ("nan", "inf") for loss in losses[first - 1 : last])
    assert kept[-1].step == len(losses)
    assert [each.loss_is_no_number for each in kept[-min(3, len(losses) % cut or cut) :]] == [
        loss in ("nan", "inf") for loss in losses[-min(3, len(losses) % cut or cut) :]
    ]


def test_ranks_that_write_one_file_are_one_row_and_two_programs_are_none() -> None:
    (row,) = row_of(f"[rank{rank}]: step {step}/100" for step in range(1, 9) for rank in (0, 1))
    assert row.step == 8
    lagging = row_of(f"step {step}/100" for step in (1, 2, 1, 3, 2, 4, 3))
    assert [each.step for each in lagging] == [4]
    turns = row_of(f"step {step}/100" for step in (50, 7, 51, 8, 52, 9))
    assert [each.step for each in turns] == [50, 51, 52, 9] or [each.step for each in turns] == [50, 7, 51, 8, 52, 9]


def test_what_stands_between_steps_stays_between_them(log: Log) -> None:
    log.write("step 1/9\nstep 2/9\nsaving checkpoint\nstep 3/9\nstep 4/9\n")
    assert [(item.kind.value, item.step) for item in log.read()] == [("progress", 2), ("phase", None), ("progress", 4)]


def test_steps_are_dated_by_the_glances_between_two_looks(tmp_path: Path) -> None:
    path, now = tmp_path / "x.log", 100.0
    path.write_text("step 1/9\n")
    one = LogFollower(str(path), start=0)

    def look(at: float) -> list[tuple[str, float]]:
        one.refresh(at, at, {})
        while one.has_more:
            one.read(at, at)
        return [(str(each.step or each.pattern), each.age_s) for each in one.drain_events()[0]]

    look(now)
    for second, text in ((1, "step 2/9\n"), (2, "CUDA out of memory\n"), (3, "step 3/9\n"), (4, "")):
        with open(path, "a") as file:
            file.write(text)
        one.glance(now + second, now + second)
    assert look(now + 5) == [("2", 4.0), ("cuda_oom", 3.0), ("3", 2.0)]


def test_a_glance_does_not_open_a_file_that_was_closed(log: Log) -> None:
    log.write("step 1/9\n")
    assert steps(log.read()) == [1]
    log.tail.close()
    log.tail.glance(log.now, log.now)
    assert log.tail.fd == -1


def test_between_two_requests_the_file_that_carries_the_step_is_looked_at_and_no_other(tmp_path: Path) -> None:
    names = ("note", "old", "first", "second")
    paths = {name: str(tmp_path / name) for name in names}
    for name, text in (("note", "hello\n"), ("old", "step 1/9\n"), ("first", "step 2/9\n"), ("second", "step 2/9\n")):
        Path(paths[name]).write_text(text)
    os.utime(paths["old"], (1.0, 1.0))
    worker, seen = WorkerState(), list[str]()
    request = Follow([("4", path, 0) for path in paths.values()], closely=["4"])
    follow(request, worker)
    for tail in worker.memory(FollowMemory).tails.values():
        tail.glance = lambda now, wall, path=tail.path: seen.append(path)  # type: ignore[method-assign,misc]
    follow(request, worker)
    assert worker.between is not None
    worker.between()
    assert seen == [paths["first"]]


def test_secrets_are_masked_in_what_leaves_and_a_line_of_progress_has_no_text() -> None:
    key = "hf_" + "aB3dE5gH7j" * 3
    error, step = f"RuntimeError: CUDA error: {key}", f"step 3/9 {key}"
    for line in (error, step):
        fact = parse_line(line)
        assert fact is not None
        assert key not in str(shown(make_event(fact, 0.0)))
    assert shown(make_event(fact, 0.0)).line == ""
