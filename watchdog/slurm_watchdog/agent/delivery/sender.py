"""Sends reports from a thread of its own, keeps them while the controller is away, and hands what it says to the loop.

A report is encoded once, and waits as bytes: the objects would take many times what the bound says. One at a time is
on its way: it stays in the spool until the controller says that it was taken, and is sent again on the next stream, so
that none is lost; the controller knows by its number one that it has. One that only says that all is as before is not
answered. What the controller asks comes at any time.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from slurm_watchdog.agent.delivery.spool import Spool, Waiting
from slurm_watchdog.agent.delivery.stream import (
    ANSWER_S,
    UNIX,
    Controller,
    Controllers,
    OwnSocket,
    ProvenStream,
    Refused,
    TlsController,
    in_words,
    parse_reply,
    wait_readable,
)
from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import printable
from slurm_watchdog.config.agent import Security
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report, is_state
from slurm_watchdog.wire.codec import WireError, encode_report, encode_state
from slurm_watchdog.wire.frames import NEWS, ORDERS, REPORT, STATE, TAKEN, FrameError

log = logging.getLogger(__name__)
T = TypeVar("T")

BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 5.0)
"""Waits between attempts; with 4,000 agents and jitter a controller that comes back sees 1,000 streams a second."""
OF_THE_REPORT = frozenset({"garbage", "too_large"})  # Why a proven controller will never take a report.


def backoff_s(failures: int, chance: float) -> float:
    """How long to wait after so many failures in a row; `chance` in [0, 1) spreads agents out."""
    longest = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1] if failures else 0.0
    return longest * (0.5 + 0.5 * chance)


def _chance() -> float:
    """In [0, 1). The module random would cost a quarter of a megabyte."""
    return int.from_bytes(os.urandom(4), "little") / 2**32


def encode(report: Report) -> bytes:
    """The bytes of a report, odd bytes in names replaced. Raises WireError if it is too large."""
    try:
        return encode_report(report)
    except UnicodeEncodeError:
        return encode_report(printable(report))


def _ring(fd: int) -> None:
    with suppress(BlockingIOError):  # it is readable already
        os.write(fd, b"r")


def _silence(fd: int) -> None:
    with suppress(BlockingIOError):
        os.read(fd, 4096)


def _taken_from(waiting: queue.SimpleQueue[T]) -> list[T]:
    found: list[T] = []
    with suppress(queue.Empty):
        while True:
            found.append(waiting.get_nowait())
    return found


def controllers(urls: Sequence[str], security: Security, node: str) -> Controllers:
    """Those of `node`; no traffic yet."""
    return Controllers([_controller(url, security, node) for url in urls])


def _controller(url: str, security: Security, node: str) -> Controller:
    if url.startswith(UNIX):
        return OwnSocket(url.removeprefix(UNIX), node)
    if security.identity() == "tls":
        return TlsController(url, node, TlsFiles(security.tls_directory, "agent"))
    # Only here: the other agents do without its memory.
    from slurm_watchdog.agent.delivery.munge_connection import Munge, MungeController

    return MungeController(url, node, Munge(security.controller_user, security.munge_socket).encode)


class Sender:
    """The thread. `put`, `replies` and `orders` are for the loop; `fileno` is readable when there is news."""

    def __init__(
        self,
        spool: Spool,
        controllers: Controllers,
        count: Callable[[str], None] = lambda outcome: None,
        now: Callable[[], float] = clock.monotonic,
        answer_s: float = ANSWER_S,
    ):
        self.controllers = controllers
        self._spool = spool
        self._count = count
        self._now = now
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._last: tuple[bytes, Reply] = (b"", Reply())
        self._link: ProvenStream | None = None
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_fd, self._waker_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # For the thread: something to send.
        self.heard_at = now()  # When the controller last took a report, or this was made.
        self.problem = ""  # Why the last attempt failed; empty while it works.
        self.lost = 0  # Reports that the controller will never have.
        self.breaks = 0  # Streams that have ended: another controller may take the next.
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def left(self) -> tuple[Waiting, ...]:
        """What the controller has not taken, oldest first; one on its way just now is among them. After `stop`."""
        with self._lock:
            return self._spool.left()

    def stop(self, seconds: float = 2.0) -> None:
        """Gives what waits this long to be sent, and ends. Whatever the thread hangs in, it holds no one up."""
        self._stopping.set()
        _ring(self._waker_fd)
        self._thread.join(seconds)

    def put(self, report: Report) -> None:
        """Hands a report over; never waits. Raises WireError if it is too large to send."""
        is_short = is_state(report)
        body = encode_state(report) if is_short else encode(report)
        with self._lock:
            dropped = self._spool.dropped
            self._spool.put(report.sequence, body, self._now(), is_state=is_short)
            dropped = self._spool.dropped - dropped
        self.lost += dropped
        for _ in range(dropped):
            self._count("expired")
        _ring(self._waker_fd)

    def fileno(self) -> int:
        return self._read_fd

    def replies(self) -> list[Reply]:
        """Replies since the last call, oldest first. One that says what the last one said woke no one."""
        _silence(self._read_fd)
        return _taken_from(self._replies)

    def orders(self) -> list[Reply]:
        """What was asked since the last call, between two replies."""
        return _taken_from(self._orders)

    @property
    def spool_bytes(self) -> int:
        return self._spool.size

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while True:
            with self._lock:
                waiting = self._spool.first()
            try:
                if waiting is None:
                    if self._stopping.is_set():
                        return
                    self._listen()
                    continue
                self._deliver(waiting)
            except (OSError, ValueError, WireError, FrameError) as error:
                proven = self._link is not None
                self._close()
                if waiting is not None and proven and isinstance(error, Refused) and error.code in OF_THE_REPORT:
                    self._count("rejected")
                    self.lost += 1
                    self._say(f"a report was dropped: {error}")
                else:
                    self._say(
                        f"the controller at {self.controllers.current.where} cannot be reached: {in_words(error)}"
                    )
                    self.controllers.next()
                    if waiting is None:
                        continue  # nothing waits: the next report goes over a new stream
                    self._count("failed")
                    failures += 1
                    if self._stopping.wait(backoff_s(failures, _chance())):
                        return
                    with self._lock:
                        self._spool.expire(self._now())
                    continue
            else:
                self._count("sent")
                if self.problem:
                    log.info("the controller at %s answers again", self.controllers.current.where)
                self.problem = ""
            failures = 0
            with self._lock:
                self._spool.done(waiting.sequence)

    def _deliver(self, waiting: Waiting) -> None:
        """One report, over a new stream where there is none. Raises what ends the stream."""
        if self.controllers.current.is_renewed():
            self._close()
        if self._link is None:
            self._link = self.controllers.current.open(self._answer_s)
        if waiting.is_state:
            if self._last[0]:  # else it would be the first one of its stream: the next report is whole
                self._link.send(STATE, waiting.aged(self._now()))
                self._replies.put(replace(self._last[1], commands=()))  # it holds: else there would be NEWS
            return
        self._link.send(REPORT, waiting.aged(self._now()))
        while (frame := self._link.receive()) is None or not self._take(*frame):
            pass

    def _listen(self) -> None:
        """Until something is to be sent, or the stream ends."""
        link = self._link
        if link is None:
            wait_readable(self._wake_fd)
        elif (frame := link.receive(self._wake_fd)) is not None:
            self._take(*frame)
            return
        _silence(self._wake_fd)

    def _take(self, kind: bytes, body: bytes) -> bool:
        """Whether it is the answer to the report that is on its way. Raises FrameError, WireError."""
        if kind not in (TAKEN, NEWS, ORDERS):
            raise FrameError("garbage", "it sent a frame that nothing asked for")
        if kind == ORDERS:
            self._orders.put(parse_reply(body))
            _ring(self._write_fd)
            return False
        self.heard_at = self._now()
        if body == self._last[0] and not self._last[1].commands:
            self._replies.put(self._last[1])
            return kind == TAKEN
        reply = parse_reply(body)
        self._last = (body, reply)
        self._replies.put(reply)
        _ring(self._write_fd)
        return kind == TAKEN

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
            self.breaks += 1
        self._link, self._last = None, (b"", Reply())  # what was said on one stream is not said on the next

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
