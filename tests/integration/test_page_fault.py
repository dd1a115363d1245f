"""A page fault on a file of a server that says nothing any more, in an ordinary user's process: whose file it
is, is found out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.children.requests import BlockedCall, ResolveCalls, WorkerState
from slurm_watchdog.agent.proc.blocked_calls import BlockedThreads
from slurm_watchdog.agent.proc.files import read_file, read_stat
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory, describe_blocked, see_call
from slurm_watchdog.base import clock, loop
from slurm_watchdog.knowledge.syscalls import PAGE_FAULT
from tests.builders.requests import answer_to
from tests.integration.silent_server import NOBODY, Silent

READER = """
import mmap, sys
data = open(sys.argv[1], "rb")
view = mmap.mmap(data.fileno(), 0, prot=mmap.PROT_READ)
data.close()
view[0]
print("mapped", flush=True)
sys.stdin.readline()
print(sum(view[at] for at in range(0, len(view), 1 << 20)), flush=True)
"""


@pytest.fixture
def reader(fuse: Silent) -> Iterator[subprocess.Popen[str]]:
    """A user's process that has mapped the file of the server, and reads all of it when it gets a line."""
    command = ["/usr/bin/python3", "-c", READER, str(fuse.point / "data.bin")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=NOBODY, group=NOBODY,
        extra_groups=[], cwd="/",
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "mapped\n"
    yield process
    fuse.speak()
    process.kill()
    process.wait(10)


def followed(pid: int) -> BlockedCallHistory:
    """What is followed of its main thread once it was seen there three times."""
    threads, start = BlockedThreads(), read_stat(pid).start_ticks
    end = clock.monotonic() + 15.0
    while clock.monotonic() < end:
        asked = threads.wanted([(pid, start, 1)], [(pid, start)], ())
        seen = see_call(lambda name: read_file(f"/proc/{pid}/task/{pid}/{name}"), lambda number: None, True)
        threads.take(asked, {(pid, pid): seen}, clock.monotonic())
        found = [track for track in threads.blocked().values() if track.sightings >= 3]
        if found:
            return found[0]
        loop.sleep(0.1)
    raise AssertionError("it was not seen to be blocked")


@pytest.mark.thorough
def test_a_page_fault_on_a_silent_server_is_told_with_its_mount_and_file_and_is_over_when_it_speaks(
    fuse: Silent, reader: subprocess.Popen[str]
) -> None:
    assert reader.stdin is not None and reader.stdout is not None
    fuse.silence()
    reader.stdin.write("go\n")
    reader.stdin.flush()
    track = followed(reader.pid)
    assert (track.seen.syscall, track.seen.path) == (PAGE_FAULT, None)
    call = BlockedCall(reader.pid, reader.pid, track.seen.syscall, [])
    (found,) = answer_to(ResolveCalls([call]), WorkerState(NOBODY))
    track.target = found.target
    blocked = describe_blocked(reader.pid, track)
    assert (blocked.mount, blocked.fs_type, blocked.candidates) == (str(fuse.point), "fuse.silent", ())
    assert blocked.path == str(Path(fuse.point, "data.bin"))
    fuse.speak()
    assert reader.stdout.readline() == "0\n"
