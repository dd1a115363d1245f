"""The kernel's log: nothing told twice, nothing missed, never deaf, and no flood hides the one line that counts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.collectors.kernel_log import MAX_RECENT, MAX_RECORDS, KernelLogReader
from slurm_watchdog.agent.proc.kmsg import MAX_EVENTS, MAX_OF_A_NAME, Deduplicator, KernelClock, KmsgFile
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent
from slurm_watchdog.parse.kernel_log.line import parse_message

XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid=12, name=python, GPU has fallen off the bus."
SILENT = "nfs: server nas01 not responding, still trying"
OK = "nfs: server nas01 OK"
DULL = "docker0: port 1(vethdead) entered blocking state"


class Ring:
    """A kernel's ring of records, and the devices that read it."""

    def __init__(self, capacity: int = 10**6) -> None:
        self.capacity = capacity
        self.records: dict[int, bytes] = {}
        self.next = 0
        self.clock_behind_s = 0.0
        self.open_error: int | None = None
        self.opened = 0

    def say(self, text: str, at: float, priority: int = 3, device: str = "") -> None:
        stamp = int((at - self.clock_behind_s) * 1e6)
        fields = f" SUBSYSTEM=pci\n DEVICE={device}\n" if device else ""
        self.records[self.next] = f"{priority},{self.next},{stamp},-;{text}\n{fields}".encode()
        self.records.pop(self.next - self.capacity, None)
        self.next += 1

    def open(self, path: str) -> KmsgFile:
        if self.open_error is not None:
            raise OSError(self.open_error, os.strerror(self.open_error), path)
        self.opened += 1
        return RingDevice(self)


class RingDevice:
    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.next = min(ring.records, default=ring.next)
        self.errors: list[int] = []
        self.closed = False
        ring_devices.append(self)

    def read(self) -> bytes:
        assert not self.closed
        if self.errors:
            raise OSError(self.errors.pop(0), "as told")
        oldest = min(self.ring.records, default=self.ring.next) if self.next not in self.ring.records else self.next
        if self.next < oldest:
            self.next = oldest
            raise OSError(errno.EPIPE, "overwritten")
        if self.next >= self.ring.next:
            raise BlockingIOError
        self.next += 1
        return self.ring.records[self.next - 1]

    def close(self) -> None:
        self.closed = True


ring_devices: list[RingDevice] = []


class Kept:
    """In place of the agent's memory: how far the log was read, and how often that was kept."""

    def __init__(self) -> None:
        self.position: int | None = None
        self.times = 0

    def keep(self, position: int, now: float) -> None:
        self.position, self.times = position, self.times + 1


@pytest.fixture(autouse=True)
def no_devices() -> Iterator[None]:
    ring_devices.clear()
    yield


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def kept() -> Kept:
    return Kept()


def started(ring: Ring, kept: Kept) -> KernelLogReader:
    return KernelLogReader("/dev/kmsg", kept.position, kept.keep, open_device=ring.open)


def names(events: tuple[NodeEvent, ...]) -> list[str]:
    return [event.name for event in events]


def test_what_the_kernel_says_is_told_once_with_its_age_and_resource(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    assert collector.collect(1000.0) == ((), 0)
    ring.say(DULL, 1001.0)
    ring.say(XID_79, 1002.5)
    (event,), dropped = collector.collect(1005.0)
    assert dropped == 0
    assert (event.name, event.xid, event.pci_bus_id, event.pid, event.process) == (
        "xid",
        79,
        "0000:c1:00.0",
        12,
        "python",
    )
    assert (event.source, event.severity, event.may_exclude_node) == (
        "kernel_log",
        FaultSeverity.CRITICAL,
        True,
    )
    assert (event.sequence, event.repeats, event.backlog) == (1, 0, False)
    assert event.age_s == pytest.approx(2.5, abs=0.1)
    assert event.line == XID_79
    assert collector.collect(1010.0) == ((), 0)


def test_the_first_start_tells_the_ring_as_a_backlog_with_true_ages(ring: Ring, kept: Kept) -> None:
    ring.say(XID_79, 400.0)
    collector = started(ring, kept)
    (event,), _ = collector.collect(1000.0)
    assert event.backlog
    assert event.age_s == pytest.approx(600.0, abs=0.1)
    ring.say(SILENT, 1001.0)
    assert [event.backlog for event in collector.collect(1005.0)[0]] == [False]


def test_a_flood_that_never_ends_makes_no_backlog_of_what_is_new(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    flags = []
    for tick in range(4):
        for number in range(MAX_RECORDS + 1):
            ring.say(SILENT if number == 0 else DULL, 1000.0 + 5.0 * tick)
        events, _ = collector.collect(1001.0 + 5.0 * tick)
        flags += [event.backlog for event in events]
    assert flags == [True, False, False, False]


def test_a_restarted_agent_tells_nothing_twice_and_misses_nothing(ring: Ring, kept: Kept) -> None:
    ring.say(XID_79, 10.0)
    first = started(ring, kept)
    assert names(first.collect(20.0)[0]) == ["xid"]
    first.close(21.0)
    ring.say(SILENT, 30.0)
    events, dropped = started(ring, kept).collect(40.0)
    assert names(events) == ["nfs_server_silent"]
    assert not events[0].backlog
    assert dropped == 0


def test_what_was_overwritten_while_no_agent_ran_is_counted(kept: Kept) -> None:
    ring = Ring(capacity=100)
    first = started(ring, kept)
    ring.say(DULL, 1.0)
    first.collect(2.0)
    first.close(2.0)
    for _ in range(150):
        ring.say(DULL, 3.0)
    assert started(ring, kept).collect(4.0) == ((), 50)


def test_the_position_is_kept_only_if_it_changed(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    for tick in range(100):
        ring.say(SILENT, 5.0 * tick)
        collector.collect(5.0 * tick)
    for tick in range(100, 200):
        collector.collect(5.0 * tick)
    assert (kept.times, kept.position) == (100, 100)


def test_a_position_beyond_the_end_of_the_log_does_not_make_deaf(ring: Ring, kept: Kept) -> None:
    kept.position = 10**9
    ring.say(XID_79, 10.0)
    collector = started(ring, kept)
    events = [*collector.collect(20.0)[0], *collector.collect(25.0)[0]]
    assert [event.name for event in events] == ["xid"]


def test_a_flood_of_100_000_lines_hides_no_gpu_off_the_bus(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    collector.collect(0.0)
    for number in range(100_000):
        ring.say(f"{DULL} {number}" if number % 2 else SILENT, 1.0)
        if number == 50_000:
            ring.say(XID_79, 1.0)
    told: list[NodeEvent] = []
    ticks = 0
    while not told or ring_devices[0].next < ring.next:
        events, dropped = collector.collect(5.0 + 5.0 * ticks)
        told += events
        ticks += 1
        assert dropped == 0
        assert len(events) <= 2
    assert ticks == -(-100_001 // MAX_RECORDS)
    assert [event.xid for event in told if event.name == "xid"] == [79]
    silent = [event for event in told if event.name == "nfs_server_silent"]
    assert sum(1 + event.repeats for event in silent) == 50_000


def test_a_flood_that_overwrites_the_ring_is_counted_by_the_gap(kept: Kept) -> None:
    ring = Ring(capacity=1000)
    collector = started(ring, kept)
    ring.say(DULL, 0.0)
    collector.collect(0.0)
    for _ in range(5000):
        ring.say(DULL, 1.0)
    ring.say(XID_79, 1.0)
    events, dropped = collector.collect(5.0)
    assert names(events) == ["xid"]
    assert dropped == 4001


def test_a_flood_of_different_faults_is_bounded_and_the_first_of_each_kind_is_told(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    for number in range(2000):
        ring.say(f"python[{number + 2}]: segfault at 0 ip 0 sp 0 error 4 in x[1+1]", 1.0)
    for number in range(400):
        ring.say(f"nfs: server nas{number} not responding, still trying", 1.0)
    for number in range(8):
        ring.say(f"NVRM: Xid (PCI:0000:{number:02x}:00): 79, GPU has fallen off the bus.", 1.0)
    events, dropped = collector.collect(2.0)
    assert len([event for event in events if event.name == "segfault"]) == MAX_OF_A_NAME
    assert len([event for event in events if event.xid == 79]) == 8
    assert len(events) <= MAX_EVENTS
    assert dropped == 2400 - 2 * MAX_OF_A_NAME


def test_even_a_full_report_has_room_for_a_new_kind() -> None:
    fold = Deduplicator()
    for number in range(1, MAX_EVENTS * 2):
        fact = parse_message(f"NVRM: Xid (PCI:0000:{number % 32:02x}:00): {number // 32 + 300}, x")
        assert fact is not None
        fold.add(fact, number, 0)
    full = len(fold.entries)
    assert MAX_EVENTS <= full < MAX_EVENTS + 16
    for line in (SILENT, XID_79):
        fact = parse_message(line)
        assert fact is not None
        fold.add(fact, 10**6, 0)
    assert len(fold.entries) == full + 2


def test_the_same_of_the_same_resource_is_told_once_with_how_often(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    for number in range(5):
        ring.say(SILENT, 1.0 + number)
    (event,), dropped = collector.collect(10.0)
    assert (event.repeats, dropped) == (4, 0)
    assert event.age_s == pytest.approx(9.0, abs=0.1)


def test_what_comes_back_after_a_recovery_is_the_last_word(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    for number in range(50):
        ring.say(SILENT, 1.0 + number)
        ring.say(OK, 1.5 + number)
    ring.say(SILENT, 60.0)
    events, _ = collector.collect(61.0)
    assert len(events) <= 4
    assert names(events)[0] == names(events)[-1] == "nfs_server_silent"
    assert events[-1].age_s == pytest.approx(1.0, abs=0.1)


def test_a_program_that_writes_to_the_log_is_not_believed(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    for priority in (8, 9, 11, 14, 30, 187):
        ring.say(XID_79, 1.0, priority)
    assert collector.collect(2.0) == ((), 0)
    tested = KernelLogReader("x", facilities=frozenset({0, 1}), open_device=ring.open)
    assert names(tested.collect(2.0)[0]) == ["xid"]


def test_a_kernel_clock_that_drifts_still_gives_ages_within_a_tick(ring: Ring, kept: Kept) -> None:
    ring.clock_behind_s = 42.0
    collector = started(ring, kept)
    ring.say(DULL, 1000.0)
    collector.collect(1000.0)
    now = 1000.0
    worst = 0.0
    for tick in range(1, 200):
        now = 1000.0 + 5.0 * tick
        ring.clock_behind_s += 5.0 * 100e-6
        said = now - (tick % 5) - 0.1
        ring.say(SILENT, said)
        (event,), _ = collector.collect(now)
        assert 0.0 <= event.age_s <= 5.0
        if tick > 20:
            worst = max(worst, abs(event.age_s - (now - said)))
    assert worst < 1.0


def test_an_age_is_never_negative_and_a_clock_that_jumped_is_learnt_again() -> None:
    clock = KernelClock()
    clock.learn(100.0, float("-inf"), 0.5)
    assert clock.age_s(100.0, 200_000_000) == 0.0
    clock.learn(105.0, 3600.0, 3604.0)
    assert 3600.0 <= clock.offset_s <= 3604.0
    clock.learn(110.0, 8.0, 3.0)
    assert clock.low <= clock.offset_s <= clock.high


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADF, errno.ENODEV])
def test_a_device_that_breaks_is_said_opened_again_and_nothing_is_told_twice(
    error: int, ring: Ring, kept: Kept
) -> None:
    collector = started(ring, kept)
    ring.say(XID_79, 1.0)
    collector.collect(2.0)
    ring_devices[-1].errors = [error]
    assert collector.collect(3.0) == ((), 0)
    assert collector.problem is not None
    assert errno.errorcode[error] in collector.problem
    ring.say(SILENT, 4.0)
    assert collector.collect(5.0) == ((), 0), "it waits a little before it tries again"
    assert names(collector.collect(8.1)[0]) == ["nfs_server_silent"]
    assert collector.problem is None


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EINVAL, errno.EINTR])
def test_a_record_that_can_not_be_had_stops_nothing(error: int, ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    collector.collect(0.0)
    ring.say(XID_79, 1.0)
    ring_devices[-1].errors = [error] * 3
    assert names(collector.collect(2.0)[0]) == ["xid"]
    assert collector.problem is None
    ring_devices[-1].errors = [error] * (MAX_RECORDS * 3)
    assert collector.collect(3.0) == ((), 0), "an error that never ends costs a bounded number of reads"


@pytest.mark.parametrize(
    ("error", "word"),
    [(errno.EACCES, "CAP_SYSLOG"), (errno.EPERM, "CAP_SYSLOG"), (errno.ENOENT, "container")],
)
def test_a_log_that_can_not_be_opened_says_what_to_do_and_is_tried_ever_again(
    error: int, word: str, ring: Ring, kept: Kept
) -> None:
    ring.open_error = error
    collector = started(ring, kept)
    for tick in range(1000):
        assert collector.collect(5.0 * tick) == ((), 0)
    assert collector.problem is not None
    assert word in collector.problem
    assert errno.errorcode[error] in collector.problem
    ring.open_error = None
    ring.say(XID_79, 5000.0)
    told = [event.name for tick in range(1000, 1020) for event in collector.collect(5.0 * tick)[0]]
    assert told == ["xid"]


def test_what_is_no_log_of_a_kernel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("6,1,1,-;x\n")
    for path in (str(tmp_path / "file"), "/dev/null", "/dev/zero"):
        with pytest.raises(OSError, match="not the kernel's log"):
            KmsgFile(path)
        collector = KernelLogReader(path)
        assert collector.collect(1.0) == ((), 0)
        assert collector.problem is not None


def test_garbage_in_the_log_harms_nothing(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    collector.collect(0.0)
    garbage = [
        b"\n",
        b";;;",
        b"x,y,z,-;a",
        b"\xff\xfe\x00,1",
        b"3,1",
        b"3,,1,-;NVRM: Xid (PCI:",
        b"3,7,x,-;" + XID_79.encode(),
        b"," * 5000,
    ]
    for data in garbage:
        ring.say("", 1.0)
        ring.records[ring.next - 1] = data
    ring.say("NVRM: Xid (PCI:0000:c1:00): 79, \\xff\\xfe \\x1b[31m caf\\xc3\\xa9", 1.0)
    events, _ = collector.collect(2.0)
    assert events[-1].xid == 79
    assert "\x1b" not in events[-1].line
    assert "café" in events[-1].line


def test_the_recent_past_is_told_again_to_a_new_controller(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    collector.collect(0.0)
    ring.say(XID_79, 100.0)
    ring.say(OK, 100.0)
    collector.collect(105.0)
    ring.say(SILENT, 300.0)
    collector.collect(305.0)
    collector.retell()
    ring.say("python[9]: segfault at 0 ip 0 sp 0 error 4 in x[1+1]", 309.0)
    events, _ = collector.collect(310.0)
    assert names(events) == ["xid", "nfs_server_silent", "segfault"], (
        "no good news, the oldest first, the new ones once"
    )
    assert events[0].age_s == pytest.approx(210.0, abs=0.1)
    assert collector.collect(315.0) == ((), 0)
    collector.retell()
    assert names(collector.collect(720.0)[0]) == ["nfs_server_silent", "segfault"]


def test_the_recent_past_is_bounded(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    for number in range(10 * MAX_RECENT):
        ring.say(f"nfs: server nas{number} not responding, still trying", float(number))
        collector.collect(float(number))
    collector.retell()
    assert len(collector.collect(float(10 * MAX_RECENT))[0]) == MAX_RECENT


def test_a_silent_kernel_costs_one_read_a_tick(ring: Ring, kept: Kept) -> None:
    collector = started(ring, kept)
    collector.collect(0.0)
    device = ring_devices[-1]
    reads = 0
    real = device.read

    def counted() -> bytes:
        nonlocal reads
        reads += 1
        return real()

    device.read = counted  # type: ignore[method-assign]
    for tick in range(1, 11):
        assert collector.collect(5.0 * tick) == ((), 0)
    assert reads == 10
