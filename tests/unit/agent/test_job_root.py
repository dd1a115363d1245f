"""Files of a job with a /tmp or a root of its own: found where its ranks have them, and nothing outside of that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from slurm_watchdog.agent.children.requests import FindFiles, WorkerState
from slurm_watchdog.agent.evidence import found_files
from slurm_watchdog.agent.evidence.found_files import find_files
from slurm_watchdog.agent.files.safe_open import open_in, roots_of
from slurm_watchdog.agent.proc.files import read_stat

CAPTURES = Path(__file__).parents[2] / "captures"
DUMP = CAPTURES / "flight_recorder" / "missing" / "trace_0"
JSON = CAPTURES / "flight_recorder" / "missing_json" / "trace_0.json"
ERROR = CAPTURES / "own_words" / "exception.json"
PRIVATE = """
mount -t tmpfs none "$1"
cp "$2" "$1/trace_0"; cp "$3" "$1/error.json"; mkfifo "$1/ask_0.pipe"
exec "$4" -c 'import os, select, shutil, sys
pipe = os.open(sys.argv[1] + "/ask_0.pipe", os.O_RDWR)
print(flush=True)
while sys.stdin not in (ready := select.select([sys.stdin, pipe], [], [])[0]):
    os.read(pipe, 1)
    shutil.copy(sys.argv[2], sys.argv[1] + "/trace_0")' "$1" "$2"
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a mount namespace")


@contextmanager
def private_tmp(place: Path) -> Iterator[int]:
    """A process for which a dump, an error file and a pipe are at `place`, where nobody else has any; its pid."""
    command = ["unshare", "--mount", "sh", "-ec", PRIVATE, "sh", place, DUMP, ERROR, sys.executable]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.communicate(timeout=30)


def asking(place: Path, *pids: tuple[int | None, int], pipe: bool = False) -> FindFiles:
    return FindFiles(
        files=[(f"{place}/trace_0", 0, 600.0)], uid=os.getuid(), max_bytes=1 << 20, places=[], max_age_s=60.0,
        pipes=[(f"{place}/ask_0.pipe", 0)] if pipe else [], error_files=[(f"{place}/error.json", 3)],
        roots=[(rank, pid, read_stat(pid).start_ticks) for rank, pid in pids],
    )  # fmt: skip


@needs_root
def test_files_in_a_private_tmp_are_read_where_a_rank_has_them(tmp_path: Path) -> None:
    with private_tmp(tmp_path) as pid:
        found = find_files(asking(tmp_path, (None, pid), (0, pid)), WorkerState())
        elsewhere = find_files(asking(tmp_path), WorkerState())
        reused = msgspec.structs.replace(asking(tmp_path), roots=[(None, pid, 1), (0, pid, 1)])
        another = find_files(reused, WorkerState())
    dump, error_file = found
    assert (dump.rank, dump.record is not None) == (0, True)
    assert (error_file.rank, error_file.path) == (3, f"{tmp_path}/error.json")
    assert (elsewhere, another) == ([], [])


@needs_root
def test_the_pipe_in_a_private_tmp_is_written_into_and_the_new_dump_read(tmp_path: Path) -> None:
    with private_tmp(tmp_path) as pid:
        request = asking(tmp_path, (0, pid), pipe=True)
        inside = Path(f"/proc/{pid}/root{tmp_path}/trace_0")
        before = inside.stat().st_mtime_ns
        with roots_of(request.roots) as roots:
            (found,) = found_files.read_flight_recorders(request, roots)
        assert inside.stat().st_mtime_ns > before
    assert found.record is not None


def test_a_process_with_our_root_or_that_has_gone_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_bytes(ERROR.read_bytes())
    own = os.getpid()
    with roots_of([(None, own, read_stat(own).start_ticks), (0, 2**22 - 1, 5)]) as roots:
        assert roots == {None: None, 0: None}
        assert len(found_files.read_error_files(asking(tmp_path), roots)) == 1


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """A root in which links and `..` lead everywhere, beside a file that is outside of it."""
    (tmp_path / "outside").write_text("outside")
    inside = tmp_path / "root"
    (inside / "tmp" / "deep").mkdir(parents=True)
    (inside / "outside").write_text("inside")
    (inside / "tmp" / "file").write_text("inside")
    for name, target in (
        ("up", "../../../.."), ("absolute", str(tmp_path)), ("self", "/proc/self/root"), ("loop", "loop"),
        ("last", "../outside"), ("tmp2", "/tmp"), ("way", "deep/../../tmp"),
    ):  # fmt: skip
        (inside / "tmp" / name).symlink_to(target)
    fd = os.open(inside, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    "path", ["/outside", "/tmp/../../outside", "/tmp/up/outside", "/tmp/tmp2/file", "/tmp/way/file", "/tmp/./file"]
)
def test_what_leads_above_the_root_of_a_job_stays_in_it(root: int, path: str) -> None:
    with open(open_in(root, path, os.O_RDONLY)) as file:
        assert file.read() == "inside"


@pytest.mark.parametrize(
    "path",
    ["/tmp/last", "/tmp/absolute/outside", "/tmp/self/etc/passwd", "/tmp/loop/file", "/tmp/file/file", "/", "/tmp/.."],
)
def test_a_link_at_the_end_and_what_is_outside_of_the_root_is_not_opened(root: int, path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        open_in(root, path, os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_two_dumps_of_a_rank_that_were_written_together_the_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(DUMP.read_bytes())
    (tmp_path / "trace_0.json").write_bytes(JSON.read_bytes())
    names = found_files.names_of(f"{tmp_path}/trace_", 0)
    request = msgspec.structs.replace(asking(tmp_path), files=[(name, 0, 1e10) for name in names])
    (found,) = found_files.read_flight_recorders(request)
    assert (found.path, found.record is not None) == (f"{tmp_path}/trace_0.json", True)
    os.utime(tmp_path / "trace_0.json", (1.6e9, 1.6e9))
    (found,) = found_files.read_flight_recorders(request)
    assert (found.path, found.record is not None) == (f"{tmp_path}/trace_0", True)
