"""Reading /dev/kmsg: one record a read, without ever waiting, and never deaf.

The kernel overwrites the oldest records of its ring; a reader that was too slow gets EPIPE and continues with
the oldest that is left: what it missed is the gap in the sequence. A device that breaks is opened again, with back-off.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.model.observations import FaultSeverity
from slurm_watchdog.parse.kernel_log.line import KernelFact

log = logging.getLogger(__name__)

BUFFER_BYTES = 16384  # The longest record has 8192 bytes (PRINTK_MESSAGE_MAX and CONSOLE_EXT_LOG_MAX, kernel/printk).
KMSG_DEVICE = (1, 11)  # Of /dev/kmsg (admin-guide/devices.txt); in a container the path may be /dev/null or a console.
TAIL, INFO = 100, 6  # Records for evidence, and the first level that is not in it (syslog(3)).
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 60.0

Header = tuple[bytes, int, bytes]  # Priority as written, sequence, and the whole record.


class KmsgFile:
    """An open log of the kernel: the real device, opened without blocking."""

    def __init__(self, path: str):
        """Raises OSError if it is not the kernel's log."""
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        status = os.fstat(self._fd)
        if not stat.S_ISCHR(status.st_mode) or (os.major(status.st_rdev), os.minor(status.st_rdev)) != KMSG_DEVICE:
            os.close(self._fd)
            raise OSError(errno.ENODEV, "it is not the kernel's log", path)

    def read(self) -> bytes:
        """One record. Raises BlockingIOError if there is no more; EPIPE if unread records were overwritten."""
        return os.read(self._fd, BUFFER_BYTES)

    def fileno(self) -> int:
        """Of the open device."""
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class Kmsg:
    """A position in the kernel's log, and the device that is read."""

    def __init__(
        self, path: str, open_device: Callable[[str], KmsgFile] = KmsgFile, tail: deque[bytes] | None = None
    ):  # fmt: skip
        """`tail` gets the records above level "info", those that were taken before, too."""
        self.tail = deque[bytes](maxlen=TAIL) if tail is None else tail
        self._path, self._open_device = path, open_device
        self._device: KmsgFile | None = None
        self._opened_at = self._retry_at = float("-inf")
        self._retry_s = FIRST_RETRY_S
        self._newest: int | None = None
        self._fresh = False
        self.position: int | None = None  # Sequence of the next record to take; None: wherever the ring begins.
        self.lost = 0  # Records that were overwritten before they were read; the taker sets it to 0.
        self.drained = False  # Whether the last `read` came to the end.
        self.restarts = 0  # How often another log was found in its place, one that counts from the beginning.
        self.problem: str | None = None  # Why it cannot be read now.

    def read(self, now: float, limit: int) -> Iterator[Header]:
        """At most `limit` records that were not taken yet, the oldest first."""
        self.drained = False
        device = self._ready(now)
        for _ in range(limit if device is not None else 0):
            assert device is not None
            try:
                data = device.read()
            except BlockingIOError:
                self._at_end(now)
                return
            except OSError as error:
                # EINVAL: a record longer than our buffer; the kernel has gone past it. Both show as a gap.
                if error.errno in (errno.EPIPE, errno.EINVAL, errno.EINTR):
                    continue
                self._fail(now, describe(error))
                return
            if not data:
                self._fail(now, "it ended")
                return
            header = self._next(data)
            if header is not None:
                yield header

    def close(self) -> None:
        """Closes the device; `read` would open it again."""
        if self._device is not None:
            self._device.close()
            self._device = None

    def _next(self, data: bytes) -> Header | None:
        """What is new in `data`, counting what is missing before it; None if it was taken before, or is no record."""
        fields = data.split(b",", 2)
        try:
            sequence = int(fields[1])
        except (IndexError, ValueError):
            return None
        self._newest = sequence
        if fields[0].isdigit() and int(fields[0]) & 7 < INFO:
            self.tail.append(data)
        if self.position is None:
            self.position = sequence
        if sequence < self.position:
            return None
        self.lost += sequence - self.position
        self.position = sequence + 1
        return fields[0], sequence, data

    def _ready(self, now: float) -> KmsgFile | None:
        if self._device is None and now >= self._retry_at:
            self._open(now)
        return self._device

    def _open(self, now: float) -> None:
        try:
            self._device = self._open_device(self._path)
        except OSError as error:
            self._fail(now, _explain(error))
            return
        if self.problem:
            log.warning("%s can be read again", self._path)
        self.problem, self._newest, self._fresh = None, None, True
        self._opened_at = now

    def _at_end(self, now: float) -> None:
        self.drained = True
        if now - self._opened_at >= LAST_RETRY_S:
            self._retry_s = FIRST_RETRY_S
        restarted = (
            self._fresh and self._newest is not None and self.position is not None and self._newest + 1 < self.position
        )
        self._fresh = False
        if restarted:
            log.warning("%s counts from the beginning again: it is another log, read from its start", self._path)
            self.position = None
            self.drained = False
            self.restarts += 1
            self.close()

    def _fail(self, now: float, why: str) -> None:
        self.close()
        problem = f"{self._path} cannot be read: {why}"
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)


def _explain(error: OSError) -> str:
    why = describe(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{why}: it takes CAP_SYSLOG (kernel.dmesg_restrict)"
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        return f"{why}: a container without it?"
    return why


MAX_EVENTS = 256  # Events of one report. The first of each name is reported, and what is critical, even then.
MAX_OF_A_NAME = 32  # Different resources of one name in one report.
MAX_DRIFT = 1e-3  # Two clocks of one machine: NTP slews by at most 500 ppm (adjtimex(2)), crystals are off by 100.


@dataclass
class KernelClock:
    """How much must be added to the kernel's time stamps to have CLOCK_MONOTONIC. printk stamps with local_clock(),
    which NTP does not discipline: days after the boot it may be off by seconds. Two bounds are seen with each tick: a
    record that has been read is not from the future, and one that was not there when the log was last read to its end
    is younger than that."""

    offset_s: float = 0.0
    low: float = float("-inf")
    high: float = float("inf")
    at: float | None = None

    def learn(self, now: float, low: float, high: float) -> None:
        """Takes in that the offset is between `low` and `high` at `now`; what was learnt before gets less certain."""
        drift = 0.0 if self.at is None else MAX_DRIFT * max(0.0, now - self.at)
        self.at = now
        self.low, self.high = max(self.low - drift, low), min(self.high + drift, high)
        if self.low > self.high:  # one of the clocks has jumped: the machine slept, or was moved
            self.low, self.high = min(low, high), high
        self.offset_s = min(max(self.offset_s, self.low), self.high)

    def age_s(self, now: float, time_us: int) -> float:
        """Age of a record at `now`; never negative."""
        return max(0.0, now - time_us / 1e6 - self.offset_s)


Resource = tuple[Any, ...]


@dataclass
class Reported:
    """One event of a tick, and how often it came again."""

    fact: KernelFact
    sequence: int
    time_us: int
    repeats: int = 0


@dataclass
class Deduplicator:
    """The events of one tick: the same thing of the same resource is reported once, with a count. What came back after
    something else had been said about its resource is reported a second time, as the last word on it: silent, OK,
    silent must not end with OK."""

    entries: dict[tuple[Resource, bool], Reported] = field(default_factory=dict)
    latest: dict[Resource, str] = field(default_factory=dict)
    of_a_name: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    dropped: int = 0

    def add(self, fact: KernelFact, sequence: int, time_us: int) -> None:
        """Takes in one fact, in the order of the log."""
        resource = (fact.pci_bus_id, fact.gpu, fact.server, fact.mount, fact.device, fact.pid)
        key = (fact.name, fact.xid, *resource)
        before = self.latest.get(resource, fact.name)
        if (key, False) not in self.entries:
            if not self._has_room(fact):
                self.dropped += 1
                return
            self.of_a_name[fact.name, fact.xid] += 1
            self.entries[key, False] = Reported(fact, sequence, time_us)
        elif before != fact.name:
            last = self.entries.get((key, True))
            repeats = 0 if last is None else last.repeats + 1
            self.entries[key, True] = Reported(fact, sequence, time_us, repeats)
        else:
            self.entries[key, (key, True) in self.entries].repeats += 1
        if any(resource):
            self.latest[resource] = fact.name

    def _has_room(self, fact: KernelFact) -> bool:
        told = self.of_a_name[fact.name, fact.xid]
        if told >= MAX_OF_A_NAME:
            return False
        return told == 0 or len(self.entries) < MAX_EVENTS or fact.severity is FaultSeverity.CRITICAL
