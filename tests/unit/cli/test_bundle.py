"""The bundle of an incident: one file that opens everywhere, reads like text, and holds no secret and no bad name."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.base.failure import Failure
from slurm_watchdog.report.bundle import (
    bundle_files,
    check_name,
    node_files,
    safe_name,
    stack_lines,
    write_bundle,
)

MAIN = {
    "thread_id": 7,
    "name": "MainThread",
    "active": True,
    "frames": [{"function": "wait", "file": "queue.py", "line": 171}],
}
OTHER = {
    "thread_id": 8,
    "name": "pin",
    "active": False,
    "frames": [{"function": "select", "file": "selectors.py", "line": 4}],
}
MOVED = {**OTHER, "frames": [{"function": "read", "file": "selectors.py", "line": 9}]}
NODE: dict[str, Any] = {
    "node": "n1", "job_id": "4", "took_s": 4.2,
    "ranks": [
        {"pid": 7, "start_ticks": 1, "role": "rank", "rank": 3, "comm": "python", "state": "S", "threads_seen": 2,
         "dumps": [{"after_s": 0.0, "threads": [MAIN, OTHER]}, {"after_s": 9.0, "threads": [MOVED], "unchanged": [7]}],
         "sockets": [{"state": "ESTABLISHED", "local": "10.0.0.1:1", "peer": "10.0.0.2:2", "receive_queue_bytes": 65536}],
         "environment": [["NCCL_DEBUG", "INFO"]]},
        {"pid": 9, "start_ticks": 1, "role": "rank", "rank": 4, "comm": "python",
         "dumps": [{"after_s": 0.0, "error": "py-spy: Permission denied"}]},
        {"pid": 11, "start_ticks": 1, "role": "worker", "rank": 3, "comm": "pt_data", "dumps": []},
    ],
    "files": [{"kind": "flight_recorder", "path": "/tmp/x_3", "size_bytes": 6, "age_s": 5.0, "rank": 3,
               "content": base64.b64encode(zlib.compress(b"pickle")).decode()},
              {"kind": "core", "path": "/w/core.12", "size_bytes": 1000, "age_s": 5.0, "frames": ["#0 crash ()"]}],
    "log_lines": [["/w/../../etc/evil name.out", ["step 1", "api_key=abcdef12345"]]],
    "kernel_lines": ["[ 1.0] nfs: server not responding"], "settings": [["kernel", "6.1"]],
}  # fmt: skip
EXPLANATION: dict[str, Any] = {
    "incident": {"id": "7f3a", "kind": "collective_hang"},
    "timeline": [{"at": 1700000000.0, "text": "fires"}],
    "evidence": [
        {"at": 1.0, "kind": "diagnosis", "number": 1, "document": {"summary": "rank 3"}},
        {"at": 1.0, "kind": "node", "number": 2},
        {"at": 2.0, "kind": "node", "number": 2},
    ],
    "actions": [],
}


def written() -> dict[str, bytes]:
    return dict(node_files("n1", NODE))


def test_stacks_are_written_as_py_spy_prints_them_with_what_moved_last() -> None:
    files = written()
    assert files["stacks/n1/rank-3.txt"].decode() == (
        'Process 7: python\n\nThread 7 (active): "MainThread"\n    wait (queue.py:171)\n'
        '\nThread 8 (idle): "pin"\n    read (selectors.py:9)\n'
    )
    assert "Error: py-spy: Permission denied" in files["stacks/n1/rank-4.txt"].decode()
    assert "n1/rank-3-worker-11/stacks.txt" in files
    assert files["n1/rank-3/flight_recorder.pickle"] == b"pickle"
    state = files["n1/rank-3/state.txt"].decode()
    assert "sockets:\n  state: ESTABLISHED\n  local: 10.0.0.1:1" in state
    assert "environment:\n  NCCL_DEBUG: INFO\n" in state
    assert "frames:\n    #0 crash ()\n" in files["n1/node.txt"].decode()
    assert "settings:\n  kernel: 6.1\n" in files["n1/node.txt"].decode()
    assert json.loads(files["n1/node.json"])["ranks"][0]["dumps"] == NODE["ranks"][0]["dumps"]


def test_the_stacks_of_all_ranks_lie_by_themselves_and_tell_the_rank_by_their_names() -> None:
    files = written()
    alone = {name: data for name, data in files.items() if name.startswith("stacks/")}
    assert sorted(alone) == ["stacks/n1/rank-3.txt", "stacks/n1/rank-4.txt"]


def test_secrets_do_not_leave_with_a_bundle() -> None:
    whole = b"".join(written().values())
    assert b"abcdef12345" not in whole
    assert b"step 1" in whole


@pytest.mark.parametrize(
    ("name", "safe"),
    [("../../etc/passwd", "etc_passwd"), (".hidden", "hidden"), ("", "unnamed"), ("a b\n\x1b[31mc", "a_b_31mc"), ("n1", "n1"),
     ("…", "unnamed"), ("x" * 500, "x" * 80)],
)  # fmt: skip
def test_names_of_files_are_harmless(name: str, safe: str) -> None:
    assert safe_name(name) == safe


def test_no_file_lies_outside_and_two_collections_do_not_hide_each_other() -> None:
    names = [name for name, _ in bundle_files(EXPLANATION, lambda piece: NODE)]
    assert len(names) == len(set(names))
    assert "stacks/n1-2/rank-3.txt" in names
    assert not [name for name in names if name.startswith("/") or ".." in name.split("/")]


def test_the_readme_says_what_each_file_is(tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    write_bundle(str(path), EXPLANATION, lambda piece: NODE)
    with tarfile.open(path) as tar:
        members = {Path(name).name for name in tar.getnames()}
        text = tar.extractfile("incident-7f3a/README.txt").read().decode()  # type: ignore[union-attr]
    named = {"incident.json", "timeline.txt", "diagnosis.json", "state.txt", "node.txt", "node.json", "kernel.txt"}
    assert {name for name in named if name in text} == named & members == named


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar", ".tar.zst"])
def test_a_bundle_opens_with_the_usual_tools(tmp_path: Path, ending: str) -> None:
    if ending == ".tar.zst" and shutil.which("zstd") is None:
        pytest.skip("no zstd here")
    path = tmp_path / f"b{ending}"
    count = write_bundle(str(path), EXPLANATION, lambda piece: NODE)
    assert path.stat().st_mode & 0o077 == 0
    if ending == ".tar.zst":
        subprocess.run(["zstd", "-dq", str(path), "-o", str(tmp_path / "b.plain")], check=True)
        path = tmp_path / "b.plain"
    with tarfile.open(path) as tar:
        names = tar.getnames()
    assert len(names) == count
    assert "incident-7f3a/stacks/n1/rank-3.txt" in names


def test_a_name_that_cannot_be_written_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="not a bundle's name"):
        check_name(str(tmp_path / "b.zip"))
    (tmp_path / "b.tar").touch()
    with pytest.raises(Failure, match="is there already"):
        check_name(str(tmp_path / "b.tar"))


def test_a_bundle_that_fails_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    def broken(piece: Any) -> Any:
        raise Failure("The controller did not answer.")

    with pytest.raises(Failure):
        write_bundle(str(tmp_path / "b.tar.gz"), EXPLANATION, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_failed_in_between_hides_no_threads() -> None:
    dumps = [{"threads": [MAIN]}, {"error": "late"}, {"threads": [], "unchanged": [7]}]
    lines = list(stack_lines({"pid": 7, "dumps": dumps}))
    assert lines[-1] == "    wait (queue.py:171)"
