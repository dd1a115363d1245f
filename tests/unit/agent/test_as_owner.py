"""What is done in directories of users: probing leaves nothing, the kill switch is ours or nobody's."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.children import become_user
from slurm_watchdog.agent.children.requests import ProbeDirectory, WorkerState, WriteSwitch
from slurm_watchdog.agent.files.as_owner import probe_mount, remove_kill_switch, write_kill_switch
from slurm_watchdog.base import clock
from slurm_watchdog.base.mounts import mount_of, read_mounts
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.observations import MountProbe

FIELDS = {"by": "slurm-watchdog", "why": "rank 3's disk", "incident": "i1", "decision": "d1"}
CONTENT = compose_line(FIELDS)


def arguments(path: Path, **other: str) -> WriteSwitch:
    return WriteSwitch(path=str(path), node="n1", **FIELDS | other)


def to_link(path: Path) -> None:
    other = path.with_name("other")
    other.write_text(CONTENT)
    path.symlink_to(other)


def to_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


OTHERS: list[Callable[[Path], object]] = [
    Path.mkdir,
    os.mkfifo,
    lambda path: path.write_text("stop, says its owner"),
    lambda path: path.write_text(""),
    to_link,
    to_socket,
]


def test_our_switch_is_written_whole_found_again_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "kill"
    write_kill_switch(arguments(path), WorkerState())
    write_kill_switch(arguments(path), WorkerState())
    assert path.read_text() == CONTENT
    assert os.listdir(tmp_path) == ["kill"]
    remove_kill_switch(arguments(path), WorkerState())
    remove_kill_switch(arguments(path), WorkerState())
    assert os.listdir(tmp_path) == []


def test_what_a_killed_child_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".kill.n1").mkdir()  # whoever may write there can guess no name of ours
    for name in (".kill.n1.old", ".kill.n1.new", ".kill.n2.old", ".kill.n1"[1:]):
        (tmp_path / name).write_text("half a li")
    for name in (".kill.n1.directory", ".kill.n1.directory/inside"):
        (tmp_path / name).mkdir()
    (tmp_path / ".kill.n1.link").symlink_to(".kill.n2.old")
    for path in tmp_path.iterdir():
        if not path.name.endswith("new"):
            os.utime(path, (1.0, 1.0), follow_symlinks=False)
    before = set(os.listdir(tmp_path))
    write_kill_switch(arguments(tmp_path / "kill"), WorkerState())
    assert (tmp_path / "kill").read_text() == CONTENT
    assert before - set(os.listdir(tmp_path)) == {".kill.n1.old"}


@pytest.mark.skipif(os.getuid() != 0, reason="takes another user's file")
def test_a_file_of_another_user_stays(tmp_path: Path) -> None:
    other = tmp_path / ".kill.n1.old"
    other.write_text("theirs")
    os.utime(other, (1.0, 1.0))
    os.chown(other, 4711, -1)
    write_kill_switch(arguments(tmp_path / "kill"), WorkerState())
    assert sorted(os.listdir(tmp_path)) == [other.name, "kill"]


def test_a_switch_that_says_something_else_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "kill"
    write_kill_switch(arguments(path), WorkerState())
    remove_kill_switch(arguments(path, why="another reason"), WorkerState())
    assert path.exists()


def test_it_can_be_read_by_the_job_whatever_the_umask_of_its_writer(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_kill_switch(arguments(tmp_path / "kill"), WorkerState())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "kill").stat().st_mode) == 0o644


@pytest.mark.parametrize("put", OTHERS)
def test_what_a_user_put_there_stays_and_holds_no_restart_up(tmp_path: Path, put: Callable[[Path], object]) -> None:
    path = tmp_path / "kill"
    put(path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileExistsError, match="not ours"):
        write_kill_switch(arguments(path), WorkerState())
    remove_kill_switch(arguments(path), WorkerState())
    assert sorted(os.listdir(tmp_path)) == before


def test_a_directory_that_became_a_link_or_a_file_holds_no_switch_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for directory in ("file", "link", "missing"):
        remove_kill_switch(arguments(tmp_path / directory / "kill"), WorkerState())
        with pytest.raises(OSError, match=r"directory|symbolic links"):
            write_kill_switch(arguments(tmp_path / directory / "kill"), WorkerState())


def probe(directory: Path, *, write: bool, mount: str | None = None) -> MountProbe:
    here = mount_of(str(directory), read_mounts())
    assert here is not None
    args = ProbeDirectory(directory=str(directory), mount=mount or here.point, write=write, node="n1")
    return probe_mount(args, WorkerState())


@pytest.mark.parametrize("write", [False, True])
def test_a_probe_says_whether_it_wrote_and_leaves_nothing(tmp_path: Path, write: bool) -> None:
    found = probe(tmp_path, write=write)
    assert (bool(found.mount), found.responding, found.wrote, found.error) == (True, True, write, None)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_gone_is_an_answer_of_its_filesystem(tmp_path: Path) -> None:
    found = probe(tmp_path / "gone", write=True)
    assert (found.responding, found.wrote) == (True, False)
    assert (found.error or "").startswith("ENOENT")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (probe(tmp_path / "file", write=False).error or "").startswith("ENOTDIR")


def test_another_mount_than_the_one_asked_for_is_not_touched(tmp_path: Path) -> None:
    found = probe(tmp_path, write=True, mount="/nowhere")
    assert not found.mount
    assert "not on /nowhere" in (found.error or "")


def test_a_switch_that_comes_too_late_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kill"
    fields = {"node": "n1", "by": "slurm-watchdog", "why": "w", "incident": "i", "decision": "d"}
    switch = WriteSwitch(path=str(path), until_s=clock.monotonic() + 5.0, **fields)
    slow = iter((0.0, 10.0))  # it hangs in the last call, after the first look at the clock
    real = clock.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(clock, "monotonic", lambda: real + next(slow))
        with pytest.raises(TimeoutError, match="not wanted any more"):
            write_kill_switch(switch, WorkerState())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TimeoutError):
        write_kill_switch(replace(switch, until_s=clock.monotonic() - 1.0), WorkerState())
    assert list(tmp_path.iterdir()) == []
    write_kill_switch(switch, WorkerState())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("uid", "refused"), [(99_999, False), (100_000, True), (165_535, True), (165_536, False)])
def test_numbers_that_a_user_may_give_himself_are_no_users(uid: int, refused: bool) -> None:
    ranges = become_user.parse_subordinates("ann:100000:65536\nno row\nbob:x:1\n")
    assert any(uid in each for each in ranges) is refused
