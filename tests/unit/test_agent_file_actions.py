"""The kill switch on the node: ours is written whole and taken away, whatever else a user puts in its place."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from watchdog.agent.file_actions import remove_kill_switch, write_kill_switch

CONTENT = '{"decision": "d1"}\n'


def arguments(path: Path) -> dict[str, Any]:
    return {"path": str(path), "content": CONTENT, "node": "n1"}


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
    write_kill_switch(arguments(path), {})
    write_kill_switch(arguments(path), {})
    assert path.read_text() == CONTENT
    assert os.listdir(tmp_path) == ["kill"]
    remove_kill_switch(arguments(path), {})
    remove_kill_switch(arguments(path), {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("put", OTHERS)
def test_what_a_user_put_there_stays_and_holds_no_restart_up(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    path = tmp_path / "kill"
    put(path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileExistsError, match="not ours"):
        write_kill_switch(arguments(path), {})
    remove_kill_switch(arguments(path), {})
    assert sorted(os.listdir(tmp_path)) == before


def test_a_directory_that_became_a_link_or_a_file_holds_no_switch_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for directory in ("file", "link", "missing"):
        remove_kill_switch(arguments(tmp_path / directory / "kill"), {})
        with pytest.raises(OSError, match=r"directory|symbolic links"):
            write_kill_switch(arguments(tmp_path / directory / "kill"), {})
