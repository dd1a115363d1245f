"""`controller --record FILE`: whatever the controller takes over is also an entry of a recording.

The controller hands over bytes or frozen values and continues. A thread writes them; where it cannot keep up, or the
disk is full, entries are dropped and counted, and that is logged once. A file that blocks (a pipe without a reader)
holds that thread and nothing else.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

from slurm_watchdog.base import clock
from slurm_watchdog.recording.entries import Entry, Value, pack

log = logging.getLogger(__name__)

MAX_WAITING = 4000  # Entries that wait for the disk: seconds of a thousand nodes.
MAX_WAITING_BYTES = 64 * 1024**2
END_S = 5.0  # What still waits at the end of the service gets this long to be written.


class Recorder:
    """One file."""

    def __init__(self, path: str, *, max_waiting: int = MAX_WAITING):
        self.path = path
        self.dropped = 0  # Entries that are missing from the file.
        self._waiting: queue.Queue[Entry | None] = queue.Queue(max_waiting)
        self._put = self._written = 0  # Bytes of frames that were handed over, and of those written; a thread each.
        self._thread = threading.Thread(target=self._write_until_closed, name="recorder", daemon=True)
        self._thread.start()

    def record(self, what: bytes | Value) -> None:
        """Takes over an entry of this moment. Never waits."""
        size = _size(what)
        try:
            if self._put - self._written + size > MAX_WAITING_BYTES:
                raise queue.Full
            self._waiting.put_nowait(Entry(clock.monotonic(), clock.wall(), what))
            self._put += size
        except queue.Full:
            self._drop(1, "the disk does not keep up")

    def close(self) -> None:
        """Writes what waits, for a few seconds at most."""
        try:
            self._waiting.put(None, timeout=END_S)
        except queue.Full:
            self._drop(self._waiting.qsize(), "the disk does not keep up")
        else:
            self._thread.join(END_S)
        if self.dropped:
            log.warning("%s lacks %d entries that could not be written", self.path, self.dropped)

    def _drop(self, number: int, why: str) -> None:
        if not self.dropped:
            log.warning("entries are missing from %s: %s; the controller continues without them", self.path, why)
        self.dropped += number

    def _write_until_closed(self) -> None:
        fd = -1
        while (entry := self._waiting.get()) is not None:
            try:
                data = pack(entry)
                if fd < 0:
                    fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    os.fchmod(fd, 0o600)  # it holds lines of jobs, and the file may have been there
                while data:
                    data = data[os.write(fd, data) :]
            except (OSError, ValueError, OverflowError, TypeError, RecursionError) as error:  # or a value without bytes
                self._drop(1, getattr(error, "strerror", None) or f"an entry cannot be written ({error})")
            self._written += _size(entry.what)
        if fd >= 0:
            os.close(fd)


def _size(what: bytes | Value) -> int:
    return len(what) if isinstance(what, bytes) else 0
