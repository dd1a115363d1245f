"""The real /dev/kmsg: our own records, floods that overwrite the kernel's ring, restarts.

The kernel gives what programs write the facility `user`, so these tests believe that one; everybody else on
this machine does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.collectors.kernel_log import KernelLogReader
from slurm_watchdog.agent.proc.kmsg import KmsgFile
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import NodeEvent
from tests.builders.requests import functions
from tests.rig.commands import wait_until
from tests.rig.filesystems import set_frozen

KMSG = "/dev/kmsg"
RATE_LIMIT = Path("/proc/sys/kernel/printk_devkmsg")
USER = frozenset({0, 1})

pytestmark = [
    pytest.mark.exclusive,
    pytest.mark.skipif(
        not os.access(KMSG, os.R_OK | os.W_OK) or not os.access(RATE_LIMIT, os.W_OK),
        reason="needs root and a machine of its own with /dev/kmsg (not a container)",
    ),
]


class CountedFile(KmsgFile):
    """The real device, which remembers the sequences that it gave."""

    sequences: list[int]

    def read(self) -> bytes:
        data = super().read()
        self.sequences.append(int(data.split(b",", 2)[1]))
        return data


@pytest.fixture
def kmsg() -> Iterator[int]:
    """A descriptor to write records with, as many as one likes: the kernel lets programs write ten in five seconds."""
    before = RATE_LIMIT.read_text().split()[0]
    RATE_LIMIT.write_text("on\n")
    fd = os.open(KMSG, os.O_WRONLY | os.O_CLOEXEC)
    yield fd
    os.close(fd)
    RATE_LIMIT.write_text(before + "\n")


@pytest.fixture
def probes() -> Iterator[WorkerPool]:
    probes = WorkerPool(functions("read_state", "write_state"))
    yield probes
    probes.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A local filesystem that may be frozen; it answers again when the test is over."""
    image, point = tmp_path / "disk.ext4", Path(tempfile.mkdtemp(prefix="slurm-watchdog-state-"))
    with open(image, "wb") as file:
        file.truncate(16 * 1024**2)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, timeout=60)
    yield point
    set_frozen(point, False)
    for _ in range(100):
        if subprocess.run(["umount", str(point)], capture_output=True, timeout=60).returncode == 0:
            break
        time.sleep(0.1)
    point.rmdir()


@pytest.fixture
def server() -> str:
    """A name that no other record on this machine has."""
    return f"nas-{uuid.uuid4().hex[:12]}"


def say(fd: int, text: str) -> None:
    """Writes one record as user.info, which no console prints."""
    os.write(fd, f"<14>{text}\n".encode())


def poll_for_seconds(probes: WorkerPool, start: float, seconds: int) -> None:
    """Lets time pass for the children as the loop does: a step too large would be a pause of the agent's own.

    Only once they have begun, which takes true time: the clock here is a made-up one.
    """
    assert wait_until(lambda: probes.poll(start) == set() and all(w.born for w in probes._workers.values()), 60.0)
    for second in range(seconds + 1):
        probes.poll(start + second)


def silent(server: str) -> str:
    return f"nfs: server {server} not responding, still trying"


def look(collector: KernelLogReader, server: str) -> tuple[list[NodeEvent], int]:
    """Events about `server` from ticks until the log is read to its end, and what was dropped meanwhile."""
    events: list[NodeEvent] = []
    dropped = 0
    for _ in range(100):
        told, lost = collector.collect(clock.monotonic())
        events += told
        dropped += lost
        if not told and not lost:
            break
    return [event for event in events if event.server == server], dropped


def test_a_record_is_told_with_its_age_once_the_kernel_has_it(kmsg: int, probes: WorkerPool, server: str) -> None:
    collector = KernelLogReader(KMSG, "boot", "", probes, USER)
    look(collector, server)
    say(kmsg, silent(server))
    written_at = clock.monotonic()
    (event,), _ = look(collector, server)
    assert collector.problem is None
    assert event.name == "nfs_server_silent"
    assert not event.backlog
    assert event.sequence is not None
    assert 0.0 <= event.age_s <= clock.monotonic() - written_at + 1.0


def test_a_program_can_not_play_the_kernel(kmsg: int, probes: WorkerPool, server: str) -> None:
    collector = KernelLogReader(KMSG, "boot", "", probes)
    os.write(kmsg, f"<3>{silent(server)}\n".encode())
    os.write(kmsg, f"<0>{silent(server)}\n".encode())
    os.write(kmsg, f"{silent(server)}\n".encode())
    assert look(collector, server)[0] == []


def test_what_stood_there_before_the_first_start_is_a_backlog(kmsg: int, probes: WorkerPool, server: str) -> None:
    say(kmsg, silent(server))
    (event,), _ = look(KernelLogReader(KMSG, "boot", "", probes, USER), server)
    assert event.backlog


def test_escapes_controls_and_long_lines_come_through_bounded(kmsg: int, probes: WorkerPool, server: str) -> None:
    collector = KernelLogReader(KMSG, "boot", "", probes, USER)
    look(collector, server)
    os.write(kmsg, f"<14>{silent(server)} \x1b[31m café ".encode() + b"\xff" * 900 + b"\n")
    (event,), _ = look(collector, server)
    assert "café" in event.line
    assert "\x1b" not in event.line
    assert len(event.line) <= 500


@pytest.mark.thorough
def test_a_flood_that_overwrites_the_ring_is_counted_and_the_next_fault_is_told(
    kmsg: int, probes: WorkerPool, server: str
) -> None:
    sequences: list[int] = []

    def open_counted(path: str) -> KmsgFile:
        device = CountedFile(path)
        device.sequences = sequences
        return device

    collector = KernelLogReader(KMSG, "boot", "", probes, USER, open_counted)
    look(collector, server)
    say(kmsg, silent(server))
    (first,), _ = look(collector, server)
    before = len(sequences)
    last_before = sequences[-1]
    for number in range(100_000):
        say(kmsg, f"watchdog's test: line {number} of a flood that says nothing")
    say(kmsg, f"nfs: server {server} OK")
    (second,), dropped = look(collector, server)
    assert second.name == "nfs_server_ok"
    assert first.sequence is not None
    assert second.sequence is not None
    assert second.sequence - first.sequence > 100_000
    read = len(sequences) - before
    assert dropped > 0, "the kernel's ring is expected to hold fewer than 100,000 records"
    assert dropped + read == sequences[-1] - last_before


@pytest.mark.thorough
def test_a_flood_that_is_read_in_time_loses_nothing(kmsg: int, probes: WorkerPool, server: str) -> None:
    collector = KernelLogReader(KMSG, "boot", "", probes, USER)
    look(collector, server)
    told, lost = [], 0
    for number in range(100_000):
        say(kmsg, silent(server) if number == 50_000 else f"watchdog's test: line {number}")
        if number % 500 == 499:
            events, dropped = collector.collect(clock.monotonic())
            told += [event for event in events if event.server == server]
            lost += dropped
    assert [event.name for event in told] == ["nfs_server_silent"]
    assert lost == 0


def test_a_restarted_agent_goes_on_where_it_was(kmsg: int, probes: WorkerPool, server: str, tmp_path: Path) -> None:
    state = str(tmp_path / "state" / "kernel_log.json")
    say(kmsg, silent(server))
    first = KernelLogReader(KMSG, "boot", state, probes, USER)
    assert [event.name for event in look(first, server)[0]] == ["nfs_server_silent"]
    first.close(clock.monotonic())
    assert json.loads(Path(state).read_text())["boot_id"] == "boot"
    say(kmsg, f"nfs: server {server} OK")
    second = KernelLogReader(KMSG, "boot", state, probes, USER)
    (event,), dropped = look(second, server)
    assert (event.name, event.backlog, dropped) == ("nfs_server_ok", False, 0)
    of_another_boot = KernelLogReader(KMSG, "another", state, probes, USER)
    assert [event.backlog for event in look(of_another_boot, server)[0]] == [True, True]


def test_without_the_right_to_read_it_the_problem_says_what_to_do(probes: WorkerPool, tmp_path: Path) -> None:
    collector = KernelLogReader(str(tmp_path / "missing"), "boot", "", probes)
    assert collector.collect(clock.monotonic()) == ((), 0)
    assert collector.problem is not None
    assert "ENOENT" in collector.problem


@pytest.mark.thorough
def test_a_local_disk_that_freezes_holds_a_child_and_no_event(
    kmsg: int, probes: WorkerPool, server: str, disk: Path
) -> None:
    state = disk / "kernel_log.json"
    collector = KernelLogReader(KMSG, "boot", str(state), probes, USER)
    look(collector, server)
    collector.close(clock.monotonic())
    written = state.read_text()
    set_frozen(disk, True)
    later = clock.monotonic() + 100.0
    say(kmsg, silent(server))
    told = [event for event in collector.collect(later)[0] if event.server == server]
    assert len(told) == 1, "the position is to be written now, and that hangs"
    say(kmsg, silent(server))
    poll_for_seconds(probes, later, 10)
    assert [hung.probe for hung in probes.hung(later + 10.0)] == ["state"]
    assert [event.server for event in collector.collect(later + 20.0)[0] if event.server == server] == [server]
    assert collector.state_problem is not None
    set_frozen(disk, False)
    assert wait_until(lambda: bool(probes.poll(later + 25.0)) or probes.is_free("state"), 20.0)
    collector.close(later + 30.0)
    assert state.read_text() != written


@pytest.mark.thorough
def test_a_state_file_that_can_not_be_read_for_ever_delays_the_first_look_by_seconds(
    kmsg: int, probes: WorkerPool, server: str, tmp_path: Path
) -> None:
    state = tmp_path / "kernel_log.json"
    os.mkfifo(state)  # opening it for reading waits for a writer that never comes
    say(kmsg, silent(server))
    collector = KernelLogReader(KMSG, "boot", str(state), probes, USER)
    began = clock.monotonic()
    assert collector.collect(began) == ((), 0)
    assert clock.monotonic() - began < 3.0, "the loop itself waits a moment only"
    poll_for_seconds(probes, began, 5)
    told = [event for event in collector.collect(began + 5.0)[0] if event.server == server]
    assert [event.backlog for event in told] == [True]
    assert [hung.probe for hung in probes.hung(began + 5.0)] == ["state"]
