"""Sends reports from a thread of its own, keeps them while the controller is away, and hands its replies to the loop."""

from __future__ import annotations

import http.client
import logging
import os
import queue
import random
import ssl
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from watchdog import clock
from watchdog.model import Reply, Report
from watchdog.wire import MAX_BYTES, WireError, decode_reply, encode_report

log = logging.getLogger(__name__)

CONNECT_S = 5.0
ANSWER_S = 15.0
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 5.0)
"""Waits between attempts; with 4,000 agents and jitter a controller that comes back sees 1,000 requests a second."""
TRY_AGAIN_LATER = frozenset({408, 425, 429})


@dataclass
class Spool:
    """Reports that wait, oldest first, bounded by bytes and by age. What does not fit any more is dropped from the old end."""

    max_bytes: int
    max_age_s: float
    dropped: int = 0
    size: int = 0
    _items: deque[tuple[float, int, Report]] = field(default_factory=deque)

    def put(self, report: Report, size: int, now: float) -> None:
        """Adds a report of `size` bytes that was made at `now`."""
        self._items.append((now, size, report))
        self.size += size
        while len(self._items) > 1 and self.size > self.max_bytes:
            self._drop_oldest()
        self.expire(now)

    def expire(self, now: float) -> None:
        """Drops what is too old, but never the newest."""
        while len(self._items) > 1 and now - self._items[0][0] > self.max_age_s:
            self._drop_oldest()

    def first(self, now: float) -> Report | None:
        """The oldest report, with its age as of `now`; it stays until `done`."""
        if not self._items:
            return None
        made_at, _, report = self._items[0]
        return replace(report, age_s=max(0.0, now - made_at))

    def done(self, sequence: int) -> None:
        """Forgets the oldest report if it is still the one with this sequence."""
        if self._items and self._items[0][2].sequence == sequence:
            self.size -= self._items.popleft()[1]

    def __len__(self) -> int:
        return len(self._items)

    def _drop_oldest(self) -> None:
        self.size -= self._items.popleft()[1]
        self.dropped += 1


def backoff_s(failures: int, chance: float) -> float:
    """How long to wait after so many failures in a row; `chance` in [0, 1) spreads agents out."""
    longest = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1] if failures else 0.0
    return longest * (0.5 + 0.5 * chance)


class Rejected(Exception):
    """The controller will never take this report: it is dropped."""


class Sender:
    """The thread. `put` and `replies` are for the loop, `fileno` becomes readable when there is a reply."""

    def __init__(
        self,
        url: str,
        spool: Spool,
        token_file: str = "",
        count: Callable[[str], None] = lambda outcome: None,
        now: Callable[[], float] = clock.monotonic,
    ):
        self._address = urlsplit(url)
        self._spool = spool
        self._token_file = token_file
        self._token = ""
        self._count = count
        self._now = now
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._connection: http.client.HTTPConnection | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Reads the token and begins to send."""
        self.read_token()
        self._thread.start()

    def stop(self, seconds: float = 2.0) -> None:
        """Gives what waits this long to be sent, and ends."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(seconds)

    def put(self, report: Report) -> None:
        """Hands a report over; never waits. Raises WireError if it is too large to send."""
        size = len(encode_report(report))
        with self._lock:
            dropped = self._spool.dropped
            self._spool.put(report, size, self._now())
            for _ in range(self._spool.dropped - dropped):
                self._count("expired")
        self._wake.set()

    def fileno(self) -> int:
        return self._read_fd

    def replies(self) -> list[Reply]:
        """Replies since the last call, oldest first."""
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            pass
        found = []
        while True:
            try:
                found.append(self._replies.get_nowait())
            except queue.Empty:
                return found

    @property
    def spool_bytes(self) -> int:
        return self._spool.size

    @property
    def problem(self) -> str:
        """Why the last attempt failed; empty while it works."""
        return self._problem

    def read_token(self) -> None:
        """Reads the shared secret (again). A missing file is a problem that is said, not an end."""
        if not self._token_file:
            return
        try:
            self._token = Path(self._token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            log.error(
                "the token file %s can't be read (%s): the controller will refuse us", self._token_file, error
            )

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while True:
            with self._lock:
                report = self._spool.first(self._now())
            if report is None:
                if self._stopping.is_set():
                    return
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                reply = self._send(report)
            except Rejected as error:
                self._count("rejected")
                self._say(f"a report was dropped: {error}")
            except (OSError, http.client.HTTPException, WireError) as error:
                self._count("failed")
                self._say(f"the controller at {self._address.netloc} can't be reached: {error}")
                self._disconnect()
                failures += 1
                if self._stopping.wait(backoff_s(failures, random.random())):
                    return
                with self._lock:
                    self._spool.expire(self._now())
                continue
            else:
                self._count("sent")
                if self._problem:
                    log.info("the controller at %s answers again", self._address.netloc)
                self._problem = ""
                self._replies.put(reply)
                self._notify()
            failures = 0
            with self._lock:
                self._spool.done(report.sequence)

    def _notify(self) -> None:
        try:
            os.write(self._write_fd, b"r")
        except BlockingIOError:
            pass  # it is readable already

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem

    def _send(self, report: Report) -> Reply:
        """One request. Raises Rejected for good, anything else to be tried again."""
        try:
            body = encode_report(report)
        except WireError as error:
            raise Rejected(str(error)) from error
        connection = self._connect()
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        connection.request("POST", f"{self._address.path.rstrip('/')}/v1/report", body, headers)
        if connection.sock is not None:
            connection.sock.settimeout(ANSWER_S)
        with connection.getresponse() as response:
            data = response.read(MAX_BYTES + 1)
        if response.status == 200:
            return decode_reply(data)
        text = data[:300].decode(errors="replace").strip()
        message = f"{self._address.netloc} answered {response.status} {response.reason}: {text}"
        if 400 <= response.status < 500 and response.status not in TRY_AGAIN_LATER:
            if response.status in (401, 403):
                self.read_token()
            raise Rejected(message)
        raise ConnectionError(message)

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port = self._address.hostname or "", self._address.port
            if self._address.scheme == "https":
                context = ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
