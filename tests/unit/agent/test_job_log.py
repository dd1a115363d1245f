"""The logs of jobs, read by real children: which files, several mounts of which one hangs, children that die,
limits."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_value

from slurm_watchdog.agent.children.answers import OpenFiles
from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.children.requests import Request, WorkerState
from slurm_watchdog.agent.logs import job_logs
from slurm_watchdog.agent.logs.job_logs import MAX_FILES, JobLogs
from slurm_watchdog.base import clock
from slurm_watchdog.base.mounts import Mount, MountNews
from slurm_watchdog.controller.state.progress_clock import lines_of
from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.model.observations import Event, EventKind, LogFile, Process, Role
from slurm_watchdog.model.protocol import JobWatch
from tests.builders.fake_children import looks
from tests.builders.requests import BY_NAME, tasks

ROOT = Mount("/", "ext4", "/dev/sda1")


def no_mounts(fields: Any, worker: WorkerState) -> list[Mount]:
    return []


def list_open(fields: Any, worker: WorkerState) -> dict[str, OpenFiles]:
    """The processes of these tests have the files open that their job's name says."""
    return {job_id: OpenFiles(tuple(job_id.split("+")[1:])) for job_id, *_ in fields.processes}


def follow(silent: Path, fields: Any, worker: WorkerState) -> Any:
    while (place := silent.read_text()) and any(path.startswith(place) for _, path, _ in fields.files):
        time.sleep(0.02)
    return BY_NAME["follow"].do(fields, worker)


USER = os.getuid() or 64983
"""An ordinary user's children do the looking."""


class Node:
    """An agent's share of logs, with real children and a clock that follows the real one."""

    def __init__(self, mounts: tuple[Mount, ...] = (ROOT,), patterns: tuple[str, ...] = (), **limits: int):
        self.silent = Path(tempfile.mkstemp(prefix="slurm-watchdog-silent-")[1])
        """Names the place whose logs are not read while it stands there: a server that does not answer."""
        self.probes = Children(
            tasks(follow=partial(follow, self.silent), list_mounts=no_mounts, list_open_files=list_open)
        )
        self.logs = JobLogs(looks(self.probes), mounts, "n1", patterns, become_owner=False, **limits)
        self.events: list[Event] = []
        self.dropped = 0
        self.skew_s = 0.0

    def watch(self, *paths: Path, job_id: str = "4") -> None:
        watch = JobWatch(job_id=job_id, restarts=0, uid=os.getuid(), log_paths=tuple(map(str, paths)))
        self.logs.here.hear([*self.logs.watch.values(), watch])

    def collect(self, processes: tuple[Process, ...] = (), deadline_s: float = 10.0) -> list[LogFile]:
        now = clock.monotonic() + self.skew_s
        environs = {job_id: {"SLURM_JOB_USER": "ann"} for job_id in self.logs.watch}
        self.probes.poll(now)  # as each tick does: an answer that came late
        rows, events, dropped = self.logs.collect(now, processes, environs, deadline_s)
        self.events += events
        self.dropped += dropped
        return list(rows)

    def until(self, condition: Callable[[list[LogFile]], bool], deadline_s: float = 10.0) -> list[LogFile]:
        """Collects until the rows are as they should be."""
        for _ in range(200):
            rows = self.collect(deadline_s=deadline_s)
            if condition(rows):
                return rows
            time.sleep(0.02)
        raise AssertionError(f"still {rows}")

    def pid_of(self, key: str) -> int:
        return int(self.logs._taken[key].split(":")[0])

    def steps(self, *, backlog: bool = False) -> list[int | None]:
        return [each.step for event in self.events if event.backlog == backlog for each in lines_of(event)]


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(*args: Any, **kwargs: Any) -> Node:
        nodes.append(Node(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.probes.close()


def write(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def process(job_id: str, pid: int = 100) -> Process:
    return Process(pid=pid, start_ticks=1, job_id=job_id, role=Role.RANK, comm="python", state="S", uid=USER)


def two_mounts(tmp_path: Path, fs_type: str = "nfs4") -> tuple[Mount, ...]:
    for name in "ab":
        (tmp_path / name).mkdir()
    return (ROOT, *(Mount(f"{tmp_path}/{name}", fs_type, f"/dev/{name}") for name in "ab"))


@pytest.mark.parametrize("fs_type", ["nfs4", "xfs"])
def test_a_mount_that_does_not_answer_holds_its_logs_alone_and_loses_none_of_their_lines(
    tmp_path: Path, make_node: Callable[..., Node], fs_type: str
) -> None:
    node = make_node(two_mounts(tmp_path, fs_type))
    a, b = tmp_path / "a" / "x.log", tmp_path / "b" / "x.log"
    write(a, "step 1/9\n")
    write(b, "step 101/900\n")
    node.watch(a, b)
    node.until(lambda rows: all(row.offset for row in rows))
    node.silent.write_text(f"{tmp_path}/a")
    try:
        write(a, "step 2/9\n")
        write(b, "step 102/900\n")
        hung = node.until(lambda rows: "has not answered" in (rows[0].error or ""), deadline_s=0.2)
        assert hung[1].error is None
        write(a, "step 3/9\n")
        write(b, "step 103/900\n")
        node.until(lambda rows: rows[1].offset == b.stat().st_size)
        assert node.steps() == [102, 103]
        assert [probe.probe for probe in node.probes.hung(clock.monotonic())] == [f"files:{tmp_path}/a:self"]
    finally:
        node.silent.write_text("")
    write(a, "step 4/9\n")
    back = node.until(lambda rows: rows[0].offset == a.stat().st_size and rows[0].error is None)
    assert back[0].lag_bytes == 0
    node.collect()
    assert sorted(step or 0 for step in node.steps()) == [2, 3, 4, 102, 103]


def test_a_child_that_was_killed_is_followed_by_one_that_goes_on_where_it_was(
    tmp_path: Path, make_node: Callable[..., Node]
) -> None:
    node, path = make_node(), tmp_path / "x.log"
    write(path, "step 1/9\n")
    node.watch(path)
    node.until(lambda rows: rows[0].offset == 9)
    os.kill(node.pid_of("files:/:self"), signal.SIGKILL)
    write(path, "step 2/9\n")
    node.until(lambda rows: rows[0].offset == 18)
    assert node.steps(backlog=True) == [1]
    assert node.steps() == [2]


def test_a_pattern_with_wildcards_finds_the_logs_of_ranks(tmp_path: Path, make_node: Callable[..., Node]) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}").mkdir()
        write(tmp_path / f"rank_{rank}" / "stdout.4[0].log", "begun\n")
        write(tmp_path / f"rank_{rank}" / "stdout.40.log", "another job's\n")
    node = make_node(patterns=(f"{tmp_path}/rank_*/stdout.{{job_id}}.log", f"{tmp_path}/{{workdir}}/x.log"))
    node.watch(job_id="4[0]")
    rows = node.until(lambda rows: len(rows) == 3 and all(row.offset for row in rows))
    assert sorted(row.path for row in rows) == [f"{tmp_path}/rank_{rank}/stdout.4[0].log" for rank in range(3)]
    write(tmp_path / "rank_1" / "stdout.4[0].log", "step 1/9\n")
    node.until(lambda rows: node.steps() == [1])
    assert node.events[-1].source == f"{tmp_path}/rank_1/stdout.4[0].log"


def test_an_open_file_that_is_the_jobs_output_is_counted_once(tmp_path: Path, make_node: Callable[..., Node]) -> None:
    out, err = tmp_path / "x.out", tmp_path / "x.err"
    write(out, "begun\n")
    os.link(out, err)
    node, job_id = make_node(), f"4+{err}"
    node.watch(out, job_id=job_id)
    node.collect((process(job_id),))
    node.until(lambda rows: len(rows) == 2 and all(row.offset == 6 for row in rows))
    write(err, "step 1/9\n")
    rows = node.until(lambda rows: all(row.offset == 15 for row in rows))
    assert node.steps() == [1]
    assert [row.error for row in rows] == [None, None]


def test_logs_beyond_the_limit_are_named_in_a_row(tmp_path: Path, make_node: Callable[..., Node]) -> None:
    paths = [tmp_path / f"{number}.log" for number in range(MAX_FILES + 3)]
    for path in paths:
        path.touch()
    node = make_node()
    node.watch(*paths)
    rows = node.until(lambda rows: rows[0].offset is not None)
    assert len(rows) == MAX_FILES + 1
    assert rows[-1].path == str(paths[MAX_FILES])
    assert rows[-1].error == f"not followed, like 2 more: at most {MAX_FILES} logs of a job are on one node"


def test_of_too_many_events_the_errors_stay(tmp_path: Path, make_node: Callable[..., Node]) -> None:
    node, path = make_node(max_waiting_events=30), tmp_path / "x.log"
    path.touch()
    node.watch(path)
    node.until(lambda rows: rows[0].offset == 0)
    write(
        path,
        "OSError: [Errno 28] No space left on device\n" + "".join(f"step {n}/9{n}\n" for n in range(1, 41)),
    )
    node.until(lambda rows: rows[0].offset == path.stat().st_size)
    assert [event.kind for event in node.events].count(EventKind.ERROR) == 1
    assert node.steps()[1:] == list(range(12, 41))
    assert node.dropped == 11


def test_when_the_job_has_ended_its_files_are_let_go(tmp_path: Path, make_node: Callable[..., Node]) -> None:
    node, path = make_node(two_mounts(tmp_path)), tmp_path / "a" / "x.log"
    write(path, "step 1/9\n")
    node.watch(path)
    node.until(lambda rows: rows[0].offset == 9)
    pid = node.pid_of(f"files:{tmp_path}/a:self")
    assert str(path) in {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    node.logs.here.hear([])
    node.skew_s = job_logs.KEPT_AFTER_END_S + 1
    assert node.until(lambda rows: not rows) == []
    for _ in range(200):
        if not os.path.exists(f"/proc/{pid}/fd/0"):
            break
        time.sleep(0.02)
    assert f"files:{tmp_path}/a:self" not in node.probes.names()


def test_a_path_below_a_new_mount_gets_a_child_of_its_own(make_node: Callable[..., Node]) -> None:
    logs = make_node().logs
    assert logs.key_of("/scratch/x.log", 7) == logs.key_of("/scratch/x.log", 7) == "files:/:7"
    logs.mounts = (ROOT, Mount("/scratch", "nfs4", "server:/scratch"))
    assert logs.key_of("/scratch/x.log", 7) == "files:/scratch:7"
    assert logs.key_of("/scratch/x.log", -1) == "files:/scratch:self"
    logs.mounts = (ROOT, Mount("/scratch", "xfs", "/dev/sdb"))
    assert logs.key_of("/scratch/x.log", 7) == "files:/scratch:7", "a disk that hangs is no silence of another one"


class Answering:
    """Takes every question; the answer comes before the next tick."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    def ask(
        self,
        key: str,
        request: Request[Any],
        deadline_s: float,
        now: float,
        then: Callable[..., None],
        *_: Any,
        **__: Any,
    ) -> int:
        self.asked.append((request.task, now))
        return 1

    def settle(self, seconds: float, requests: Any) -> None:
        pass


def test_the_table_of_mounts_is_read_again_when_the_kernel_says_that_it_has_changed_and_now_and_then_anyway() -> None:
    probes, news = Answering(), {100.0, 130.0, 700.0}
    logs = JobLogs(looks(probes), (ROOT,), "n1", (), become_owner=False, mount_news=lambda: now in news)  # type: ignore[arg-type]
    for tick in range(401):
        now = 5.0 * tick
        logs._renew_mounts(now, 1.0)
    assert [at for function, at in probes.asked if function == "list_mounts"] == [
        0.0,
        100.0,
        160.0,
        700.0,
        1600.0,
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone may mount")
def test_the_kernel_tells_of_each_mount_that_comes_or_goes(tmp_path: Path) -> None:
    news = MountNews()
    while news():  # of other tests
        pass
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        assert news()
        while news():
            pass
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert news()


def test_where_the_table_of_mounts_cannot_be_watched_it_may_always_have_changed(tmp_path: Path) -> None:
    news = MountNews(str(tmp_path / "nothing"))
    assert news()
    assert news()


def test_the_ranks_that_rays_log_names_are_known_until_another_run_begins(
    tmp_path: Path, make_node: Callable[..., Node]
) -> None:
    log, row = tmp_path / "out", "- (ip=192.0.2.2, pid={}) world_rank={}, local_rank={}, node_rank=0\n"
    node = make_node()
    node.watch(log)
    write(log, "Started training worker group of size 2: \n" + row.format(71, 0, 0) + row.format(72, 1, 1))
    node.until(lambda _: bool(node.logs.seats()))
    assert node.logs.seats() == {"4": {71: WorkerRank(0, 0, 2), 72: WorkerRank(1, 1, 2)}}
    with log.open("a") as lines:
        lines.write("(RayTrainWorker pid=72) RuntimeError: bad sample in shard 17\n")
    node.until(lambda _: bool(node.events))
    assert node.events[0].rank == 1
    node.logs.here.hear([replace_value(node.logs.watch["4"], restarts=1)])
    node.collect()
    assert node.logs.seats() == {}
