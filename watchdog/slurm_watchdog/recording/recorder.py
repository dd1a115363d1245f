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

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.recording.entries import MAX_BODY, Begin, Entry, Listing, State, pack

log = logging.getLogger(__name__)

MAX_WAITING = 4000  # Entries that wait for the disk: seconds of a thousand nodes.
MAX_WAITING_BYTES = 64 * 1024**2
END_S = 5.0  # What still waits at the end of the service gets this long to be written.

_Item = tuple[bytes, float, float, bytes | Struct | SlurmView]


class Recorder:
    """One file."""

    def __init__(self, path: str, *, max_waiting: int = MAX_WAITING):
        self.path = path
        self.dropped = 0  # Entries that are missing from the file.
        self._waiting: queue.Queue[_Item | None] = queue.Queue(max_waiting)
        self._put = self._written = 0  # Bytes of frames that were handed over, and of those written; a thread each.
        self._warned = False
        self._jobs: dict[str, SlurmJob] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._state: State | None = None
        self._thread = threading.Thread(target=self._write_until_closed, name="recorder", daemon=True)
        self._thread.start()

    def record(self, kind: bytes, body: bytes | Struct = b"") -> None:
        """Takes over an entry of this moment. Never waits."""
        size = len(body) if isinstance(body, bytes) else 0
        try:
            if self._put - self._written + size > MAX_WAITING_BYTES:
                raise queue.Full
            self._waiting.put_nowait((kind, clock.monotonic(), clock.wall(), body))
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
        self.dropped += number
        if not self._warned:
            self._warned = True
            log.warning("entries are missing from %s: %s; the controller continues without them", self.path, why)

    def _write_until_closed(self) -> None:
        fd = -1
        while (item := self._waiting.get()) is not None:
            data = self._packed(*item)
            try:
                if fd < 0:
                    fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    os.fchmod(fd, 0o600)  # it holds lines of jobs, and the file may have been there
                while data:
                    data = data[os.write(fd, data) :]
            except OSError as error:
                self._forget()  # what differs from something that was not written would be half of it
                self._drop(1, error.strerror or str(error))
            self._written += len(item[3]) if isinstance(item[3], bytes) else 0
        if fd >= 0:
            os.close(fd)

    def _packed(self, kind: bytes, at: float, wall: float, what: bytes | Struct) -> bytes:
        """The bytes of an entry; none for what is as it was, or cannot be written."""
        match what:
            case Begin():
                self._forget()
            case SlurmView():
                what = self._changes(what)
            case State():
                if what == self._state:
                    return b""
                self._state = what
        try:
            body = what if isinstance(what, bytes) else msgspec.msgpack.encode(what)
        except (
            ValueError,
            OverflowError,
            TypeError,
            RecursionError,
        ) as error:  # a value without bytes
            self._drop(1, f"an entry cannot be written ({error})")
            return b""
        if len(body) > MAX_BODY:
            self._drop(1, "an entry is too long")
            return b""
        return pack(Entry(kind, at, wall, body))

    def _forget(self) -> None:
        """What comes next is written whole."""
        self._jobs, self._nodes, self._state = {}, {}, None

    def _changes(self, view: SlurmView) -> Listing:
        """What differs from the listing before."""
        jobs, nodes = {job.job_id: job for job in view.jobs}, {node.name: node for node in view.nodes}
        changes = Listing(
            jobs=tuple(job for job in view.jobs if self._jobs.get(job.job_id) != job),
            nodes=tuple(node for node in view.nodes if self._nodes.get(node.name) != node),
            gone_jobs=tuple(self._jobs.keys() - jobs.keys()),
            gone_nodes=tuple(self._nodes.keys() - nodes.keys()),
            dropped=view.dropped,
            partial=view.partial,
        )
        self._jobs, self._nodes = jobs, nodes
        return changes
