"""The only module that sleeps: fixed cadence, one failure stays one failure, signals only set flags, sd_notify."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import zlib
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TypeVar

import msgspec

from slurm_watchdog.base import clock

log = logging.getLogger(__name__)
T = TypeVar("T")


def share_of(name: str) -> float:
    """A number from 0 to 1 that is always the same for `name`, and evenly spread over many names."""
    return zlib.crc32(name.encode(errors="surrogateescape")) / 2**32


def next_due(due: float, now: float, interval_s: float) -> float:
    """When the tick after the one of `due` starts: on the same grid, after `now`; missed ticks are not made up."""
    missed = max(0, int((now - due) // interval_s))
    return due + (missed + 1) * interval_s


class Isolated(msgspec.Struct):
    """What became of the parts of one tick."""

    problems: list[str] = msgspec.field(default_factory=list)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    failed: set[str] = msgspec.field(default_factory=set)


def isolate(name: str, work: Callable[[], T], default: T, seen: Isolated) -> T:
    """Runs one part of a tick. If it raises, `seen` gets a sentence about it, the log a traceback, and
    `default` comes back. The time of parts with the same name adds up."""
    began = clock.monotonic()
    try:
        return work()
    except Exception as error:  # the boundary: one part never stops the others
        log.exception("%s failed", name)
        seen.problems.append(f"{name}: {type(error).__name__}: {error}")
        seen.failed.add(name)
        return default
    finally:
        seen.seconds[name] = seen.seconds.get(name, 0.0) + clock.monotonic() - began


HANDLED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})  # Signals that ask for something.


class Signals:
    """SIGTERM and SIGINT ask to stop, SIGHUP to read files again. Handlers set flags and nothing else."""

    def __init__(self) -> None:
        self.stop = False
        self.reload = False
        self.restart = False  # Ends the loop since this process re-executes itself, which systemd must not see.
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def install(self) -> None:
        """Takes the signals over, in the main thread, after every child was forked that should not have them."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)  # see hold

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self.reload = True

    def fileno(self) -> int:
        """Readable after a signal: a wait that includes it ends at once."""
        return self._read_fd

    def hold(self) -> None:
        """From now on they wait for `install` of the program that this process becomes by exec: none is lost,
        and a SIGHUP in between would end it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        if self.reload:
            os.kill(os.getpid(), signal.SIGHUP)  # came too late to be looked at: it is the next one's

    def drain(self) -> None:
        """Empties the wake-up pipe."""
        try:
            while os.read(self._read_fd, 4096):
                pass
        except BlockingIOError:
            pass


class Waiter:
    """A set of descriptors to wait for, kept by the kernel: nothing is rebuilt for each wait."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: set[int] = set()

    def watch(self, fd: int, writing: bool = False) -> None:
        """From now on `wait` returns `fd` when it can be read or has ended; with `writing` when it can be written."""
        events = select.EPOLLIN | (select.EPOLLOUT if writing else 0)
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
            self._watched.add(fd)

    def forget(self, fd: int) -> None:
        """No longer waits for `fd`; to be called before it is closed."""
        if fd in self._watched:
            self._watched.discard(fd)
            self._epoll.unregister(fd)

    def wait(self, seconds: float) -> list[int]:
        """Sleeps until one of them is ready, at most `seconds` (to the next millisecond); returns those that are."""
        return [fd for fd, _ in self._epoll.poll(max(0.0, seconds))]

    def fileno(self) -> int:
        """Readable while one of them is ready: a set can be waited for within another."""
        return self._epoll.fileno()

    def close(self) -> None:
        """Gives the set back; what is in it stays open."""
        self._epoll.close()


def wait_readable(fds: Iterable[int], seconds: float) -> list[int]:
    """Sleeps until one of `fds` can be read, at most `seconds`; returns those that can."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(max(0.0, seconds) * 1000)]


def sleep(seconds: float) -> None:
    """Sleeps, where there is nothing to wake up for: never in a service."""
    wait_readable((), seconds)


def run_cadence(
    tick: Callable[[float], bool],
    interval_s: float,
    signals: Signals,
    share: float = 0.5,
    wake_fds: Callable[[], Iterable[int]] = tuple,
    between: Callable[[float], None] = lambda now: None,
    took: Callable[[float], None] = lambda seconds: None,
    wanted_at: Callable[[], float] = lambda: float("inf"),
) -> None:
    """Calls `tick(now)` every `interval_s` until a signal says stop, or `signals.restart` is set.

    After the first tick the next one comes after half an interval and `share` (0 to 1) of another: where many machines
    were started in one moment, each has a moment of its own within it.

    While it waits it calls `between(now)` whenever one of `wake_fds()` becomes readable, and at
    `wanted_at()`. Ticks stay on their grid: one that took long, or a pause of the whole process, delays the
    next tick and never causes a burst of them. After each tick that returns True, because it was whole, and
    only then, systemd gets a sign of life. `took` is called with the duration of each tick.
    """
    due = clock.monotonic()
    ready = is_placed = False
    while not signals.stop and not signals.restart:
        now = clock.monotonic()
        if now >= due:
            if tick(now):
                sd_notify("WATCHDOG=1" if ready else "READY=1\nWATCHDOG=1")
                ready = True
            ended = clock.monotonic()
            took(ended - now)
            due = next_due(due, ended, interval_s) if is_placed else ended + (0.5 + share) * interval_s
            is_placed = True
            continue
        soon = wanted_at()
        readable = wait_readable([signals.fileno(), *wake_fds()], min(due, soon) - now)
        if signals.fileno() in readable:
            signals.drain()
        if (readable or clock.monotonic() >= soon) and not signals.stop:
            between(clock.monotonic())
    if signals.stop:
        sd_notify("STOPPING=1")


def sd_notify(message: str) -> bool:
    """Sends `message` (see sd_notify(3)) to systemd if it waits for one; False where it does not."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(message.encode(), address)
    except OSError as error:
        log.warning("systemd could not be notified: %s", error)
        return False
    return True
