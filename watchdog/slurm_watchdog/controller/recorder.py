"""`controller --record FILE`: whatever the controller takes over is also a line of a trace.

The controller hands over frozen values and continues. A thread writes them; where it cannot keep up, or the
disk is full, records are dropped and counted, and that is said once. A file that blocks (a pipe that no one
reads) holds that thread and nothing else.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator

from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.trace.records import Controller, Own
from slurm_watchdog.trace.write import gone_line, listing_lines, own_line, report_lines

log = logging.getLogger(__name__)

MAX_WAITING = 4000  # Reports and listings that wait for the disk: seconds of a thousand nodes, tens of MiB.
END_S = 5.0  # What still waits at the end of the service gets this long to be written.

_Item = tuple[float, Report | SlurmView | Own]


class Recorder:
    """One file. `offset_s` is added to every `now`: with it the trace has dates instead of a clock without meaning."""

    def __init__(self, path: str, offset_s: float = 0.0, *, max_waiting: int = MAX_WAITING):
        self.path = path
        self.dropped = 0  # Reports, listings and single lines that are missing from the file.
        self._offset_s = offset_s
        self._waiting: queue.Queue[_Item | None] = queue.Queue(max_waiting)
        self._warned = False
        self._torn = False  # The last write broke off in the middle of a line.
        self._jobs: dict[str, SlurmJob] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._own: Controller | None = None
        self._thread = threading.Thread(target=self._write_until_closed, name="recorder", daemon=True)
        self._thread.start()

    def record(self, what: Report | SlurmView | Own, now: float) -> None:
        """Takes over a report that was accepted, a listing, or what the controller says of itself, at `now`.
        Never waits."""
        try:
            self._waiting.put_nowait((now + self._offset_s, what))
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
            log.warning("%s lacks %d records that could not be written", self.path, self.dropped)

    def _drop(self, number: int, why: str) -> None:
        self.dropped += number
        if not self._warned:
            self._warned = True
            log.warning("records are missing from %s: %s; the controller continues without them", self.path, why)

    def _write_until_closed(self) -> None:
        fd = -1
        while (item := self._waiting.get()) is not None:
            data = b"".join(self._lines(*item))
            try:
                if fd < 0:
                    fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    os.fchmod(fd, 0o600)  # it holds lines of jobs, and an older release made it readable for the group
                    self._torn = os.fstat(fd).st_size > 0  # the process that wrote it before may have been killed
                self._write(fd, data)
            except OSError as error:
                self._drop(1, error.strerror or str(error))
        if fd >= 0:
            os.close(fd)

    def _write(self, fd: int, data: bytes) -> None:
        """All of it, or OSError. A line that broke off is ended first, so that it costs no other one."""
        if self._torn:
            data = b"\n" + data
        while data:
            written = os.write(fd, data)
            self._torn = not data[:written].endswith(b"\n")
            data = data[written:]

    def _lines(self, at: float, what: Report | SlurmView | Own) -> Iterator[bytes]:
        try:
            for line in self._lines_of(at, what):
                if line is None:
                    self._drop(1, "a line is too long")
                else:
                    yield line
        except (ValueError, OverflowError, RecursionError) as error:  # a value that JSON does not have
            self._drop(1, f"a record cannot be written ({error})")

    def _lines_of(self, at: float, what: Report | SlurmView | Own) -> Iterable[bytes | None]:
        if isinstance(what, Report):
            return report_lines(what, at)
        if isinstance(what, SlurmView):
            return self._listing(what, at)
        if isinstance(what, Controller):
            if what == self._own:
                return ()
            self._own = what
        return (own_line(what, at),)

    def _listing(self, view: SlurmView, at: float) -> Iterable[bytes | None]:
        """Only what has changed since the listing before, and otherwise one line: Slurm answered, and the
        time continues."""
        jobs = {job.job_id: job for job in view.jobs}
        nodes = {node.name: node for node in view.nodes}
        new_jobs = [job for job in view.jobs if self._jobs.get(job.job_id) != job]
        new_nodes = [node for node in view.nodes if self._nodes.get(node.name) != node]
        yield from listing_lines(new_jobs, new_nodes, at)
        gone = [job_id for job_id in self._jobs if job_id not in jobs]
        for job_id in gone:
            yield gone_line(job_id, at)
        if not (new_jobs or new_nodes or gone):
            yield from listing_lines((), view.nodes[:1], at)
        self._jobs, self._nodes = jobs, nodes
