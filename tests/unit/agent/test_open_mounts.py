"""Which logs processes have open, on which filesystems they have files open or mapped, and that these are probed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from slurm_watchdog.agent.children.answers import OpenFiles
from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.children.requests import ListOpenFiles, WorkerState
from slurm_watchdog.agent.files.mount_probing import MountProber, wanted_mounts
from slurm_watchdog.agent.processes.open_files import (
    AT_ONCE,
    KEPT_S,
    LIST_EVERY_S,
    LISTED_IN_TURN,
    MAPPED_FROM_S,
    MAX_LISTED,
    MAX_OF_JOB,
    OpenFilesSchedule,
)
from slurm_watchdog.agent.processes.open_mounts import list_open_files, points_of, read_mapped
from slurm_watchdog.agent.processes.user_looks import APART
from slurm_watchdog.base.mounts import Mount, mount_of, read_mounts
from slurm_watchdog.model.observations import Blocked, Process, Role
from tests.builders.fake_children import FakeChildren, looks

OWN_TABLE = (
    Mount("/", "ext4", "/dev/sda1"),
    Mount("/data", "nfs4", "nas:/d"),
    Mount("/data/hot", "lustre", "m@o:/hot"),
    Mount("/run", "tmpfs", "tmpfs"),
    Mount("/home/u/mine", "fuse.sshfs", "u@x:", 1000),
)


def test_points_of_files_are_those_of_their_filesystems_without_what_cannot_fail_or_is_a_users_own() -> None:
    files = [
        "/data/a/1.bin",
        "/data/a/2.bin",
        "/data/hot/x/y/z.bin",
        "/run/t",
        "/home/u/mine/f",
        "/etc/hosts",
    ]
    assert points_of(files, OWN_TABLE, OWN_TABLE) == ["/data", "/data/hot"]
    for path in files:
        mount = mount_of(os.path.dirname(path), OWN_TABLE)
        assert mount is not None and points_of([path], OWN_TABLE, OWN_TABLE) in ([], [mount.point])


def test_a_file_in_a_container_lies_on_the_filesystem_that_the_node_has_mounted_elsewhere() -> None:
    inside = (
        Mount("/", "overlay", "overlay"),
        Mount("/datasets", "lustre", "m@o:/hot"),
        Mount("/x", "nfs4", "o:/"),
    )
    assert points_of(["/datasets/a", "/x/b", "/etc/c"], inside, OWN_TABLE) == ["/data/hot"]


def test_files_of_a_living_process_count_open_or_mapped(tmp_path: Path) -> None:
    (tmp_path / "open").write_bytes(b"x")
    (tmp_path / "mapped").write_bytes(b"x" * mmap.PAGESIZE)
    code = (
        "import mmap, os, sys; kept = open(sys.argv[1] + '/open'); f = open(sys.argv[1] + '/mapped', 'rb'); "
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        paths = [f"/proc/{child.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{child.pid}/fd")]
        assert str(tmp_path / "mapped") in read_mapped(child.pid)
        rows = [("7", child.pid, Role.RANK, True), ("7", 2**22 - 1, Role.RANK, True)]
        found = list_open_files(ListOpenFiles(rows), WorkerState(os.getuid()))
        own = read_mounts()
        points = points_of({*map(os.readlink, paths), *read_mapped(child.pid)}, own, own)
        child.communicate()
    assert found == {"7": OpenFiles((), tuple(points))}


def test_logs_are_what_is_written_and_of_a_worker_its_output_alone(tmp_path: Path) -> None:
    code = (
        "import sys; at = sys.argv[1]; kept = [open(at + '/a.log', 'w'), open(at + '/b', 'a'), open(at + '/c', 'w')]; "
        "kept += [open(at + '/a.log')]; sys.stderr.write('x'); sys.stderr.flush(); sys.stdin.read()"
    )
    with (
        open(tmp_path / "out", "w") as out,
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE
        ) as child,
    ):
        assert child.stderr is not None and child.stderr.read(1) == b"x"
        found = {
            role: list_open_files(ListOpenFiles([("7", child.pid, role, False)]), WorkerState(os.getuid()))["7"]
            for role in Role
        }
        child.communicate()
    output, more = str(tmp_path / "out"), {str(tmp_path / "a.log"), str(tmp_path / "b")}
    assert found[Role.WORKER].logs == (output,)
    assert set(found[Role.RANK].logs) == set(found[Role.HELPER].logs) == {output, *more}
    assert found[Role.HELPER].mounts == ()


def process(pid: int, role: Role = Role.RANK, *, job_id: str = "7", uid: int = 1000, **more: Any) -> Process:
    return Process(pid=pid, start_ticks=1, job_id=job_id, role=role, comm="python", state="S", uid=uid, **more)


def make() -> tuple[OpenFilesSchedule, FakeChildren]:
    children = FakeChildren()
    return OpenFilesSchedule(looks(children), lambda job_id, logs: None), children


def found(job_id: str, *mounts: str) -> dict[str, OpenFiles]:
    return {job_id: OpenFiles((), mounts)}


def pids(question: dict[str, Any]) -> list[int]:
    return [pid for _, pid, *_ in question["processes"]]


def listing(rows: Sequence[Process], ticks: int) -> list[dict[str, Any]]:
    """What is asked in so many ticks of 5 s."""
    schedule, children = make()
    for tick in range(ticks):
        schedule.ask(rows, 5.0 * tick, 1.0)
        for key in list(children.busy):
            children.answer({}, key=key)
    return children.asked


def test_open_files_of_a_new_process_are_listed_soon_again_and_of_old_ones_seldom_and_together() -> None:
    asked = listing([process(pid) for pid in (1, 2, 3, 4, 5)], 400)
    assert all(pids(each) == [1, 2, 3, 4, 5] for each in asked)
    assert 9 <= len(asked) <= 14
    assert [each["at"] for each in asked][:4] == [0.0, 10.0, 30.0, 70.0]
    assert max(later["at"] - each["at"] for each, later in pairwise(asked)) <= LIST_EVERY_S


def test_mapped_files_are_asked_about_apart_and_of_ranks_alone() -> None:
    asked = listing([process(7), process(8, Role.WORKER), process(9, Role.HELPER)], 200)
    mapped = {(each["key"].endswith(APART), pid, maps) for each in asked for _, pid, _, maps in each["processes"]}
    assert mapped == {(False, 7, False), (True, 7, True), (False, 8, False), (False, 9, False)}
    assert min(each["at"] for each in asked if each["key"].endswith(APART)) <= 2 * MAPPED_FROM_S


def test_many_ranks_keep_none_of_the_others_out_and_no_user_another() -> None:
    others = [process(999, Role.WORKER), process(1000, Role.WORKER, job_id="8", uid=1001)]
    asked = listing(
        [*(process(pid) for pid in range(1, 301)), *(process(pid, Role.WORKER) for pid in range(400, 700)), *others],
        2000,
    )
    for pid in (1, 300, 699, 999, 1000):
        times = [each["at"] for each in asked if pid in pids(each)]
        assert len(times) > 2 and max(later - now for now, later in pairwise(times)) < 3600
    sizes = Counter[float]()
    for each in asked:
        sizes[each["at"]] += len(pids(each))
    assert max(sizes.values()) <= MAX_LISTED + AT_ONCE + LISTED_IN_TURN


def test_a_job_keeps_a_bounded_number_of_mounts_for_a_while_and_jobs_take_turns() -> None:
    schedule, children = make()
    rows = [process(7, job_id="1"), process(14, job_id="2", uid=1001)]
    schedule.ask(rows, 100.0, 10.0)
    children.answer(found("1", *(f"/m{each}" for each in range(40))), key="look:1000")
    children.answer(found("2", "/other"), key="look:1001")
    assert schedule.mounts()[:2] == ["/m0", "/other"]
    assert len(schedule.mounts()) == MAX_OF_JOB + 1
    schedule.ask([], 165.0, 10.0)
    assert schedule.mounts() == []


def test_a_filesystem_that_no_look_has_found_for_long_is_not_probed_any_more() -> None:
    schedule, children = make()
    schedule.ask([process(7)], 100.0, 10.0)
    children.answer(found("7", "/data"))
    assert schedule.mounts() == ["/data"]
    schedule.ask([process(7)], 100.0 + KEPT_S + 1, 10.0)
    assert schedule.mounts() == []


FAULT = Blocked(thread_id=7, seconds=50.0, state="D", syscall="page fault", candidates=("/data", "/data/hot"))


@pytest.mark.parametrize(("out", "found"), [(["/data/hot"], "/data/hot"), ([], None), (["/data", "/data/hot"], None)])
def test_a_page_fault_that_may_be_about_two_filesystems_is_about_the_only_one_that_does_not_answer(
    out: list[str], found: str | None
) -> None:
    children = FakeChildren()
    collector = MountProber(cast("Children", children), "n1", 30.0, stagger=False)
    rows = (process(7, blocked=FAULT), process(8))
    wanted = wanted_mounts([(point, -1) for point in FAULT.candidates], OWN_TABLE)
    collector.collect(100.0, 10.0, wanted)
    for point in FAULT.candidates:
        if point in out:
            children.time_out(120.0, f"probe:{point}")
        else:
            children.answer({"mounted": False}, key=f"probe:{point}")
    settled = collector.settled(rows, 120.0)
    assert settled[1] is rows[1]
    blocked = settled[0].blocked
    assert blocked is not None
    assert blocked.mount == found
    assert (blocked.device, blocked.fs_type) == (("m@o:/hot", "lustre") if found else (None, None))
