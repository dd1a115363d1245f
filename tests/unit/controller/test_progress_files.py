"""Files that a loop writes to as it turns: looked at by a child, told as a count that rises, and a clock
where the log has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.agent.children.answers import ScannedPlace
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import Request, ScanCheckpoints
from slurm_watchdog.agent.collectors.checkpoint import CLOCK_S, EVENT_OF, CheckpointSchedule
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.controller.state.counter_clock import Counter, CounterClock
from slurm_watchdog.controller.state.progress_clock import apply_step, read_progress
from slurm_watchdog.model.observations import Event
from slurm_watchdog.model.protocol import JobWatch
from tests.builders.fake_children import looks
from tests.builders.requests import answer_to


def clock_of(path: Path, mount: str = "/", budget_s: float = 5.0) -> ScannedPlace:
    (found,) = answer_to(ScanCheckpoints(mount, [], budget_s, [("clock", "7", str(path), None)]))
    assert isinstance(found, ScannedPlace)
    return found


def test_a_file_tells_when_it_was_written_and_how_large_it_is(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    assert not clock_of(path).at_ns
    path.write_bytes(b"step 5")
    os.utime(path, (1000, 1000))
    assert (clock_of(path).at_ns, clock_of(path).size_bytes) == (1000 * 10**9, 6)


def test_a_directory_tells_of_the_newest_file_in_it(tmp_path: Path) -> None:
    for name, at in (("runs/a/events.out.tfevents.1", 1000), ("runs/b/events.out.tfevents.2", 4e9)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (at, at))
    assert (clock_of(tmp_path / "runs").at_ns, clock_of(tmp_path / "runs").size_bytes) == (
        4 * 10**18,
        20,
    )


def test_a_name_that_is_a_link_is_followed_within_its_mount_and_told_of_beyond(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert clock_of(tmp_path / "link").size_bytes == 1
    beyond = tmp_path / "beyond"
    beyond.symlink_to("/proc/self/stat")
    assert clock_of(beyond, str(tmp_path)).moved == "/proc/self/stat"


def test_a_directory_that_takes_too_long_says_nothing(tmp_path: Path) -> None:
    assert not clock_of(tmp_path, budget_s=0.0).at_ns


class Children:
    """They look when they are asked, and answer later."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def ask(self, child: str, request: Request[Any], deadline_s: float, now: float, then: Any, uid: int) -> int:
        answer = Answer(request=1, key=child, value=answer_to(request))
        self.answers.append(lambda: then(answer))
        return 1

    def answer(self) -> None:
        while self.answers:
            self.answers.pop()()

    def hung_since(self, child: str, now: float) -> float | None:
        return None


def touched(path: Path, at: float) -> None:
    path.write_bytes(b"x")
    os.utime(path, (at, at))


def test_each_change_is_an_event_and_the_first_look_only_tells_where_the_count_stands(tmp_path: Path) -> None:
    children: Any = Children()
    logs = JobLogs(looks(children), (), "n1", (), False)
    logs.here.hear([JobWatch(job_id="7", restarts=0, uid=0, progress_files=(str(tmp_path / "heartbeat"),))])
    collector = CheckpointSchedule(children, logs, 60.0)
    found: list[tuple[float | None, bool]] = []
    for number, at in enumerate((1000.0, 1000.0, 1040.0, 1100.0)):
        touched(tmp_path / "heartbeat", at)
        for later in range(int(CLOCK_S)):
            rows, events = collector.collect(100.0 + number * CLOCK_S + later, 5.0, {})
            children.answer()
            assert rows == ()
            found += [(each.count, each.backlog) for each in events]
            assert {each.pattern for each in events} <= {EVENT_OF["clock"][1]}
    assert found == [(1000.0, True), (1040.0, False), (1100.0, False)]


def test_it_is_a_clock_where_the_log_tells_nothing_and_never_gives_a_step() -> None:
    clocks: dict[Counter, CounterClock] = {}

    def at(count: float, backlog: bool = False) -> Event:
        return Event(
            kind="progress",
            job_id="7",
            age_s=0.0,
            source="/h",
            count=count,
            pattern=EVENT_OF["clock"][1],
            backlog=backlog,
        )  # type: ignore[arg-type]

    for number in range(8):
        apply_step(clocks, at(1e9 + 30 * number, backlog=number == 0), 30.0 * number)
    progress = read_progress(clocks, None, float("-inf"), 300.0)
    assert progress is not None
    assert (progress.known_step, progress.steps_seen, progress.age_s) == (None, 8, 90.0)
    assert progress.intervals_s == (30.0,) * 6


def test_nothing_is_looked_at_unless_it_is_declared_and_a_template_is_checked() -> None:
    assert parse_config("").jobs.progress_files == ()
    assert parse_config("jobs:\n  progress_files: ['{workdir}/heartbeat']\n").jobs.progress_files
    with pytest.raises(ConfigError, match=r"jobs.progress_files\[0\]"):
        parse_config("jobs:\n  progress_files: ['{home}/heartbeat']\n")
