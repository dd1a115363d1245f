"""On which filesystems ranks and their workers have files open or mapped, and that these are probed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.children.requests import ListOpenMounts, WorkerState
from slurm_watchdog.agent.collectors.mount import (
    AT_ONCE,
    EVERY_S,
    FIRST_S,
    KEPT_S,
    MAX_OF_JOB,
    OpenMounts,
)
from slurm_watchdog.agent.files.mount_probing import MountProber, wanted_mounts
from slurm_watchdog.agent.processes.open_mounts import list_open_mounts, open_paths, points_of, read_mapped
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
        assert str(tmp_path / "open") in open_paths(child.pid)
        assert str(tmp_path / "mapped") in read_mapped(child.pid)
        found = list_open_mounts(
            ListOpenMounts([("7", child.pid, True), ("7", 2**22 - 1, True)]), WorkerState(os.getuid())
        )
        own = read_mounts()
        points = points_of(open_paths(child.pid) | read_mapped(child.pid), own, own)
        child.communicate()
    assert found == {"7": points}


def process(pid: int, role: Role = Role.RANK, *, job_id: str = "7", uid: int = 1000, **more: Any) -> Process:
    return Process(pid=pid, start_ticks=1, job_id=job_id, role=role, comm="python", state="S", uid=uid, **more)


def make() -> tuple[OpenMounts, FakeChildren]:
    children = FakeChildren()
    return OpenMounts(looks(children)), children


def test_ranks_and_workers_are_looked_at_soon_and_then_seldom_and_helpers_never() -> None:
    mounts, children = make()
    rows = [process(7), process(8, Role.WORKER), process(9, Role.HELPER)]
    for second in range(0, 1200, 5):
        mounts.request_due(rows, 100.0 + second, 10.0)
        if children.busy:
            children.answer({"7": ["/data"]})
    asked = [(each["at"] - 100.0, pid) for each in children.asked for pid in pids(each)]
    assert {pid for _, pid in asked} == {7, 8}
    of_rank = [at for at, pid in asked if pid == 7]
    assert of_rank[0] == FIRST_S
    assert max(b - a for a, b in pairwise(of_rank)) <= EVERY_S
    assert len(of_rank) <= 8
    assert mounts.places() == ["/data"]


def pids(question: dict[str, Any]) -> list[int]:
    return [pid for _, pid, _ in question["processes"]]


def test_one_users_hundreds_of_workers_do_not_keep_anothers_from_being_looked_at() -> None:
    mounts, children = make()
    rows = [process(pid, Role.WORKER, job_id="1") for pid in range(100, 400)] + [process(7, job_id="2", uid=1001)]
    for second in (0, 60):
        mounts.request_due(rows, 100.0 + second, 10.0)
    assert [each["uid"] for each in children.asked] == [1000, 1001]
    assert pids(children.asked[1]) == [7]
    assert sum(len(pids(each)) for each in children.asked) == AT_ONCE


def test_a_job_keeps_a_bounded_number_for_a_while_and_jobs_take_turns() -> None:
    mounts, children = make()
    rows = [process(7, job_id="1"), process(14, job_id="2", uid=1001)]
    mounts.request_due(rows, 100.0, 10.0)
    mounts.request_due(rows, 160.0, 10.0)
    children.answer({"1": [f"/m{each}" for each in range(40)], "2": ["/other"]})
    assert mounts.places()[:2] == ["/m0", "/other"]
    assert len(mounts.places()) == MAX_OF_JOB + 1
    mounts.request_due([], 165.0, 10.0)
    assert mounts.places() == []


def test_a_filesystem_that_no_look_has_found_for_long_is_not_probed_any_more() -> None:
    mounts, children = make()
    mounts.request_due([process(7)], 100.0, 10.0)
    mounts.request_due([process(7)], 160.0, 10.0)
    children.answer({"7": ["/data"]})
    mounts.request_due([process(7)], 160.0 + KEPT_S + 1, 10.0)
    assert mounts.places() == []


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
