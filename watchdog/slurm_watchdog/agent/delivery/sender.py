"""Sends reports from a thread of its own, keeps them while the controller is away, and hands its replies to the loop.

A report is encoded once, and waits as bytes: the objects would take many times what the bound says.

A controller that has the report before this one gets only what has changed since. Any doubt (an error, an
answer that did not come, a report that still waits, a controller that lacks it) makes the next one full, and
a full one goes out every ten minutes in any case.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from slurm_watchdog.agent.delivery.channel import (
    MAX_REPLY_BYTES,
    UNIX,
    Channel,
    InTurn,
    Proven,
    parse_reply,
    tls_channel,
    unix_channel,
)
from slurm_watchdog.agent.delivery.spool import Spool, Waiting
from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import printable
from slurm_watchdog.config.agent import Security
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import WireError, encode_report
from slurm_watchdog.wire.delta import changes_between, delta_base
from slurm_watchdog.wire.http_client import Connection

log = logging.getLogger(__name__)

CONNECT_S = 5.0
ANSWER_S = 15.0
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 5.0)
"""Waits between attempts; with 4,000 agents and jitter a controller that comes back sees 1,000 requests a second."""
MAX_RETRY_AFTER_S = 60.0  # A controller may ask for patience, but not until reports are too old to be judged.
TRY_AGAIN_LATER = frozenset({408, 425, 429})
FULL_EVERY = 120  # Reports between two full ones: ten minutes at 5 s.


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


def connect_in_turn(urls: Sequence[str], security: Security, node: str) -> Channel:
    """A channel to that of several controllers which takes reports; no traffic yet."""
    return InTurn([connect(url, security, node) for url in urls])


def connect(url: str, security: Security, node: str) -> Channel:
    """A channel of `node` to the controller at `url`; no traffic yet."""
    if url.startswith(UNIX):
        return unix_channel(url.removeprefix(UNIX), MAX_REPLY_BYTES)
    if security.identity() == "tls":
        return tls_channel(url, MAX_REPLY_BYTES, TlsFiles(security.tls_directory, "agent"))
    # Only here: the other agents do without its memory.
    from slurm_watchdog.agent.delivery.munge_connection import Munge, ProvenConnection

    encode = Munge(security.controller_user, security.munge_socket).encode
    return ProvenConnection(Connection(url, MAX_REPLY_BYTES), node, encode)


class Rejected(Exception):
    """The controller will never take this report: it is dropped."""


class RetryAfter(OSError):
    """The controller answered that it can't take reports now; `after_s` is how long it wants to be left alone."""

    def __init__(self, message: str, after_s: float):
        super().__init__(message)
        self.after_s = after_s


class Sender:
    """The thread. `put` and `replies` are for the loop; `fileno` is readable when there is news."""

    def __init__(
        self,
        url: str,
        spool: Spool,
        channel: Channel,
        count: Callable[[str], None] = lambda outcome: None,
        now: Callable[[], float] = clock.monotonic,
        answer_s: float = ANSWER_S,
        full_every: int = FULL_EVERY,
    ):
        """`url` is where `channel` leads to: its path, of http, is put before ours; the rest is for messages."""
        address = urlsplit(url)
        self._controller = address.netloc or url
        self._path = f"{address.path.rstrip('/') if address.netloc else ''}/v1/report"
        self._spool = spool
        self._headers = {"Content-Type": "application/json"}
        self._count = count
        self._now = now
        self._answer_s = answer_s
        self._full_every = full_every
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._last: tuple[bytes, Reply] = (b"", Reply())
        self._base: Report | None = None  # The report that was handed over last.
        self._since_full = 0
        self._agreed = -1  # The newest report that the controller has taken; -1 after any doubt.
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.channel = channel
        self.heard_at = now()  # When the controller last answered with 200, proven, or this was made.
        self.problem = ""  # Why the last attempt failed; empty while it works.
        self.lost = 0  # Reports that the controller will never have.
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
        self._wake.put(None)
        self._thread.join(seconds)

    def put(self, report: Report) -> None:
        """Hands a report over; never waits. Raises WireError if it is too large to send."""
        body = encode(report)
        with self._lock:
            agreed = self._agreed if not len(self._spool) else -1
        small = self._changes(report, agreed)
        with self._lock:
            dropped = self._spool.dropped
            self._spool.put(report.sequence, body, self._now(), small)
            dropped = self._spool.dropped - dropped
        self.lost += dropped
        for _ in range(dropped):
            self._count("expired")
        self._wake.put(None)

    def _changes(self, report: Report, agreed: int) -> bytes:
        """The report as changes since the one before, if the controller has that one; else nothing."""
        base, self._base = self._base, delta_base(report)
        if base is None or base.sequence != agreed or self._since_full >= self._full_every:
            self._since_full = 0
            return b""
        small = changes_between(base, report)
        self._since_full = 0 if small is None else self._since_full + 1
        return b"" if small is None else encode(small)

    def fileno(self) -> int:
        return self._read_fd

    def replies(self) -> list[Reply]:
        """Replies since the last call, oldest first. One that says what the last one said woke no one."""
        found: list[Reply] = []
        while True:
            try:
                found.append(self._replies.get_nowait())
            except queue.Empty:
                break
        if found:
            with suppress(BlockingIOError):
                os.read(self._read_fd, 4096)
        return found

    @property
    def spool_bytes(self) -> int:
        return self._spool.size

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures, refused = 0, -1
        while True:
            with self._lock:
                waiting = self._spool.first()
            if waiting is None:
                if self._stopping.is_set():
                    return
                self._wake.get()
                continue
            try:
                reply, news = self._send(waiting, small=failures == 0 and refused != waiting.sequence)
                if reply.want_full and refused != waiting.sequence:
                    refused = waiting.sequence  # it is reported again at once, and in full
                    self._agree(-1)
                    continue
            except Rejected as error:
                self._agree(-1)
                self._count("rejected")
                self.lost += 1
                self._say(f"a report was dropped: {error}")
            except (OSError, ValueError, WireError) as error:
                self._agree(-1)
                self._count("failed")
                self._say(f"the controller at {self._controller} cannot be reached: {in_words(error)}")
                self.channel.close()
                failures += 1
                pause_s = backoff_s(failures, _chance())
                if isinstance(error, RetryAfter):
                    pause_s = max(pause_s, min(error.after_s, MAX_RETRY_AFTER_S))
                if self._stopping.wait(pause_s):
                    return
                with self._lock:
                    self._spool.expire(self._now())
                continue
            else:
                self._agree(waiting.sequence if reply.takes_changes else -1)
                self._count("sent")
                if self.problem:
                    log.info("the controller at %s answers again", self._controller)
                self.problem = ""
                self._replies.put(reply)
                if news:
                    with suppress(BlockingIOError):  # it is readable already
                        os.write(self._write_fd, b"r")
            failures = 0
            with self._lock:
                self._spool.done(waiting.sequence)

    def _agree(self, sequence: int) -> None:
        with self._lock:
            self._agreed = sequence

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _send(self, waiting: Waiting, *, small: bool) -> tuple[Reply, bool]:
        """One request: the reply, and whether it is new. Raises Rejected for good, anything else to be tried again."""
        body = waiting.aged(self._now(), small=small)
        response = self.channel.post(self._path, body, self._headers, CONNECT_S, self._answer_s)
        if isinstance(response, Proven):
            self.heard_at = self._now()
            if response.body == self._last[0] and not self._last[1].commands:
                return self._last[1], False
            reply = parse_reply(response)
            self._last = (response.body, reply)
            return reply, True
        text = response.body[:300].decode(errors="replace").strip()
        message = f"{self._controller} answered {response.status} {response.reason}: {text}"
        if 400 <= response.status < 500 and response.status not in TRY_AGAIN_LATER:
            raise Rejected(message)
        wait = response.headers.get(b"retry-after", b"")  # a date in its place says nothing
        raise RetryAfter(message, float(wait) if wait.isdigit() and len(wait) < 10 else 0.0)


def in_words(error: Exception) -> str:
    """What went wrong, for the log: of TLS, what it means."""
    if "ssl" in sys.modules:  # else it was not TLS, and stays unloaded
        import ssl

        if isinstance(error, ssl.SSLError):
            from slurm_watchdog.identity.tls import explain

            return explain(error)
    return str(error)
