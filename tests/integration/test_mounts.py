"""Mounts that stop to answer, really: an ext4 that is frozen, and a server in user space that says nothing any more.

What the probes of mounts say of them, and what the looks at checkpoints that lie there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.collectors.checkpoint import CheckpointSchedule
from slurm_watchdog.agent.files.mount_probing import MountProber, ProbeTarget, wanted_mounts
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.agent.tasks import TASKS
from slurm_watchdog.base import clock, loop
from slurm_watchdog.base.mounts import read_mounts
from slurm_watchdog.model.observations import Checkpoint, Event, MountProbe
from slurm_watchdog.model.protocol import JobWatch
from tests.integration.silent_server import NOBODY, Silent, unmount
from tests.rig.filesystems import set_frozen

DEADLINE_S = 0.5


@pytest.fixture
def probes() -> Iterator[Children]:
    probes = Children(TASKS)
    yield probes
    probes.close()


@pytest.fixture
def ext4(place: Path) -> Iterator[Path]:
    """An ext4 of its own; it answers again when the test is over."""
    image, point = place / "image", place / "ext4"
    point.mkdir()
    subprocess.run(["truncate", "-s", "32M", str(image)], check=True, timeout=180)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=180)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, timeout=180)
    point.chmod(0o777)
    yield point
    set_frozen(point, False)
    unmount(point)


@dataclass
class Looks:
    """A collector with real children, asked as fast as the test wants."""

    probes: Children
    collector: MountProber
    wanted: dict[str, ProbeTarget]

    def until(self, enough: Callable[[tuple[MountProbe, ...]], bool], seconds: float = 10.0) -> tuple[MountProbe, ...]:
        end = clock.monotonic() + seconds
        while True:
            began = clock.monotonic()
            self.probes.poll(began)
            rows = self.collector.collect(began, DEADLINE_S, self.wanted)
            assert clock.monotonic() - began < 0.3, "the collector waited for its children"
            if enough(rows):
                return rows
            assert began < end, "it did not come to that"
            loop.sleep(0.05)

    def row(self) -> MountProbe:
        return self.until(bool)[0]


def looks(probes: Children, directory: Path, write: bool = False, uid: int = NOBODY) -> Looks:
    wanted = wanted_mounts([(str(directory), uid)], read_mounts())
    assert list(wanted) == [str(directory)]
    write_on = frozenset(wanted) if write else frozenset[str]()
    return Looks(probes, MountProber(probes, "n1", 0.2, write_on, stagger=False), wanted)


def children_of(probes: Children) -> int:
    probes.poll(clock.monotonic())
    return len(probes.pids())


def test_a_healthy_mount_answers_a_look_and_a_write_and_nothing_is_left_there(probes: Children, ext4: Path) -> None:
    row = looks(probes, ext4).row()
    assert (row.mount, row.responding, row.error, row.wrote) == (str(ext4), True, None, False)
    assert row.fs_type == "ext4"
    assert str(row.device).startswith("/dev/loop")
    row = looks(probes, ext4, write=True).row()
    assert (row.responding, row.error, row.wrote) == (True, None, True)
    assert os.listdir(ext4) == ["lost+found"]
    loop.sleep(0.2)
    assert children_of(probes) == 0, "a child that has answered is gone"


def test_a_frozen_filesystem_answers_a_look_and_not_a_write_and_its_return_is_told_once(
    probes: Children, ext4: Path
) -> None:
    reading, writing = looks(probes, ext4), looks(probes, ext4, write=True)
    assert reading.row().responding
    set_frozen(ext4, True)
    row = reading.row()
    assert (row.responding, row.wrote, row.error) == (True, False, None)
    row = writing.until(lambda rows: any(not row.responding for row in rows))[-1]
    assert row.error == f"no answer to a write in {ext4}"
    later = writing.until(lambda rows: any(row.seconds > 1.5 for row in rows))[0]
    assert (later.responding, later.wrote) == (False, False)
    assert children_of(probes) == 1
    (hung,) = probes.hung(clock.monotonic())
    assert hung.probe in (f"probe:{ext4}", f"probe:{ext4}:{NOBODY}")  # the agent's own child, or the owner's
    set_frozen(ext4, False)
    assert writing.until(lambda rows: any(row.responding for row in rows))[0].seconds == 0.0
    row = writing.row()
    assert (row.responding, row.wrote, row.error) == (True, True, None)
    assert os.listdir(ext4) == ["lost+found"]


def test_a_look_is_not_answered_from_the_clients_memory(probes: Children, fuse: Silent) -> None:
    reading = looks(probes, fuse.point)
    row = reading.row()
    assert (row.responding, row.error, row.fs_type) == (True, None, "fuse.silent")
    os.stat(fuse.point)
    fuse.silence()
    remembered = [sys.executable, "-c", f"import os; os.stat({str(fuse.point)!r})"]
    subprocess.run(remembered, check=True, timeout=180)  # from the attributes of a moment ago
    row = reading.until(lambda rows: any(not row.responding for row in rows))[-1]
    assert row.error == f"no answer to a look in {fuse.point}"
    reading.until(lambda rows: any(row.seconds > 1.5 for row in rows))
    assert children_of(probes) == 1
    fuse.speak()
    assert reading.until(lambda rows: any(row.responding for row in rows))[0].responding
    assert reading.row().error is None


def test_a_server_that_is_gone_for_good_is_no_mount_that_answers(probes: Children, fuse: Silent) -> None:
    reading = looks(probes, fuse.point)
    assert reading.row().responding
    fuse.server.kill()
    fuse.server.wait(10)
    row = reading.until(lambda rows: any(not row.responding for row in rows))[-1]
    assert str(row.error).startswith("ENOTCONN")


def test_a_look_is_at_the_mount_point_and_a_users_closed_or_missing_directory_says_nothing_of_it(
    probes: Children, ext4: Path
) -> None:
    closed = ext4 / "closed"
    closed.mkdir(mode=0o700)
    for directory in (closed, ext4 / "gone"):
        place = {str(ext4): ProbeTarget(str(directory), NOBODY)}
        row = Looks(probes, MountProber(probes, "n1", 0.2, stagger=False), place).row()
        assert (row.responding, row.error) == (True, None)


def test_a_mount_that_became_read_only_says_so(probes: Children, ext4: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(ext4)], check=True, timeout=180)
    assert looks(probes, ext4).row().error is None
    row = looks(probes, ext4, write=True).row()
    assert (row.responding, row.wrote, str(row.error)[:5]) == (True, False, "EROFS")


# ------------------------------------------------------------------------------------------------- checkpoints


def put_checkpoint(directory: Path, step: int) -> None:
    inner = directory / f"step-{step}"
    inner.mkdir(parents=True)
    (inner / "__0_0.distcp").write_bytes(b"x" * 1000)
    (inner / ".metadata").write_bytes(b"x" * 10)
    for path in (directory, inner, *inner.iterdir()):
        os.chown(path, NOBODY, NOBODY)


class Ticks:
    """The agent's logs and checkpoints with real children, for one job of nobody."""

    def __init__(self, probes: Children, *directories: Path):
        self.probes = probes
        self.logs = JobLogs(UserLooks(probes, ProcessTable()), read_mounts(), "n1", (), become_owner=True)
        self.logs.here.hear([JobWatch(job_id="7", restarts=0, uid=NOBODY)])
        self.collector = CheckpointSchedule(probes, self.logs, 0.2)
        self.directories = {"7": tuple(map(str, directories))}
        self.events: list[Event] = []

    def until(self, enough: Callable[[dict[str, Checkpoint]], bool]) -> dict[str, Checkpoint]:
        end = clock.monotonic() + 10
        while True:
            now = clock.monotonic()
            self.probes.poll(now)
            self.logs.collect(now, [], {}, DEADLINE_S)
            began = clock.monotonic()
            rows, events = self.collector.collect(now, DEADLINE_S, self.directories)
            assert clock.monotonic() - began < 0.3, "the collector waited for its children"
            self.events += events
            found = {row.directory: row for row in rows}
            if enough(found):
                return found
            assert now < end, f"it did not come to that: {found}"
            loop.sleep(0.05)


def test_checkpoints_on_a_silent_server_hold_up_nobody_and_are_read_again_when_it_speaks(
    probes: Children, ext4: Path, fuse: Silent
) -> None:
    put_checkpoint(ext4 / "ckpt", 100)
    ticks = Ticks(probes, ext4 / "ckpt", fuse.point)
    here, there = str(ext4 / "ckpt"), str(fuse.point)
    rows = ticks.until(lambda rows: all(row.error is None for row in rows.values()))
    assert (rows[here].step, rows[here].layout, rows[there].step) == (100, "dcp", None)
    fuse.silence()
    rows = ticks.until(lambda rows: "not answered" in str(rows[there].error))
    assert [hung.probe for hung in probes.hung(clock.monotonic())] == [f"files:{there}:{NOBODY}"]
    put_checkpoint(ext4 / "ckpt", 200)
    ticks.until(lambda rows: rows[here].step == 200)
    assert [(event.step, event.pattern) for event in ticks.events] == [(100, "directory"), (200, "directory")]
    assert children_of(probes) <= 3
    fuse.speak()
    ticks.until(lambda rows: rows[there].error is None)


def test_checkpoints_on_a_frozen_filesystem_can_still_be_read(probes: Children, ext4: Path) -> None:
    put_checkpoint(ext4 / "ckpt", 100)
    set_frozen(ext4, True)
    ticks = Ticks(probes, ext4 / "ckpt")
    rows = ticks.until(lambda rows: all(row.error is None for row in rows.values()))
    assert [row.step for row in rows.values()] == [100]


def test_a_link_to_another_mount_is_asked_of_that_mounts_child(probes: Children, ext4: Path, fuse: Silent) -> None:
    put_checkpoint(ext4 / "real", 100)
    link = ext4.parent / "link"
    link.symlink_to(ext4 / "real")
    out = ext4 / "out"
    out.symlink_to(fuse.point)
    ticks = Ticks(probes, link, out)
    rows = ticks.until(lambda rows: all(row.error is None for row in rows.values()))
    assert (rows[str(link)].step, rows[str(link)].path) == (100, f"{ext4}/real/step-100")
    fuse.silence()
    ticks.until(lambda rows: "not answered" in str(rows[str(out)].error))
    assert [hung.probe for hung in probes.hung(clock.monotonic())] == [f"files:{fuse.point}:{NOBODY}"]
    fuse.speak()


def test_a_directory_is_read_as_the_jobs_owner_and_not_as_root(probes: Children, ext4: Path) -> None:
    put_checkpoint(ext4 / "closed", 100)
    os.chown(ext4 / "closed", 0, 0)
    (ext4 / "closed").chmod(0o700)
    ticks = Ticks(probes, ext4 / "closed")
    rows = ticks.until(lambda rows: all(row.error != "not read yet" for row in rows.values()))
    assert [str(row.error)[:6] for row in rows.values()] == ["EACCES"]
