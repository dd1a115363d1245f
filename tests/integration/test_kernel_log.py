"""The real /dev/kmsg: our own records, floods that overwrite the kernel's ring, restarts.

The kernel gives what programs write the facility `user`, so these tests believe that one; everybody else on
this machine does not.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.collectors.kernel_log import KernelLogReader
from slurm_watchdog.agent.memory import Memory, MemoryFile
from slurm_watchdog.agent.proc.kmsg import KmsgFile
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import NodeEvent

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
def server() -> str:
    """A name that no other record on this machine has."""
    return f"nas-{uuid.uuid4().hex[:12]}"


def say(fd: int, text: str) -> None:
    """Writes one record as user.info, which no console prints."""
    os.write(fd, f"<14>{text}\n".encode())


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


def test_a_record_is_told_with_its_age_once_the_kernel_has_it(kmsg: int, server: str) -> None:
    collector = KernelLogReader(KMSG, facilities=USER)
    look(collector, server)
    say(kmsg, silent(server))
    written_at = clock.monotonic()
    (event,), _ = look(collector, server)
    assert collector.problem is None
    assert event.name == "nfs_server_silent"
    assert not event.backlog
    assert event.sequence is not None
    assert 0.0 <= event.age_s <= clock.monotonic() - written_at + 1.0


def test_a_program_can_not_play_the_kernel(kmsg: int, server: str) -> None:
    collector = KernelLogReader(KMSG)
    os.write(kmsg, f"<3>{silent(server)}\n".encode())
    os.write(kmsg, f"<0>{silent(server)}\n".encode())
    os.write(kmsg, f"{silent(server)}\n".encode())
    assert look(collector, server)[0] == []


def test_what_stood_there_before_the_first_start_is_a_backlog(kmsg: int, server: str) -> None:
    say(kmsg, silent(server))
    (event,), _ = look(KernelLogReader(KMSG, facilities=USER), server)
    assert event.backlog


def test_escapes_controls_and_long_lines_come_through_bounded(kmsg: int, server: str) -> None:
    collector = KernelLogReader(KMSG, facilities=USER)
    look(collector, server)
    os.write(kmsg, f"<14>{silent(server)} \x1b[31m café ".encode() + b"\xff" * 900 + b"\n")
    (event,), _ = look(collector, server)
    assert "café" in event.line
    assert "\x1b" not in event.line
    assert len(event.line) <= 500


@pytest.mark.thorough
def test_a_flood_that_overwrites_the_ring_is_counted_and_the_next_fault_is_told(kmsg: int, server: str) -> None:
    sequences: list[int] = []

    def open_counted(path: str) -> KmsgFile:
        device = CountedFile(path)
        device.sequences = sequences
        return device

    collector = KernelLogReader(KMSG, facilities=USER, open_device=open_counted)
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
def test_a_flood_that_is_read_in_time_loses_nothing(kmsg: int, server: str) -> None:
    collector = KernelLogReader(KMSG, facilities=USER)
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


def test_a_restarted_agent_goes_on_where_it_was(kmsg: int, server: str, tmp_path: Path) -> None:
    def started(boot_id: str) -> KernelLogReader:
        file = MemoryFile(str(tmp_path), boot_id, "n1")
        position = file.take(clock.monotonic()).kernel_log
        return KernelLogReader(KMSG, position, lambda new, now: file.write(Memory(kernel_log=new), now), USER)

    say(kmsg, silent(server))
    assert [event.name for event in look(started("boot"), server)[0]] == ["nfs_server_silent"]
    say(kmsg, f"nfs: server {server} OK")
    (event,), dropped = look(started("boot"), server)
    assert (event.name, event.backlog, dropped) == ("nfs_server_ok", False, 0)
    assert [event.backlog for event in look(started("another"), server)[0]] == [True, True]


def test_without_the_right_to_read_it_the_problem_says_what_to_do(tmp_path: Path) -> None:
    collector = KernelLogReader(str(tmp_path / "missing"))
    assert collector.collect(clock.monotonic()) == ((), 0)
    assert collector.problem is not None
    assert "ENOENT" in collector.problem
