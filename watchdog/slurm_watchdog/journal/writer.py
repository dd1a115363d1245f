"""Writes to a journal that may fail: what it does not take is kept in order, and written with the first tick
in which it can be.

One object knows whether the journal works. Everybody who writes does so here, or reports here that a write of
its own has failed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from slurm_watchdog.base import clock
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import Incident

log = logging.getLogger(__name__)

MAX_QUEUED = 50_000  # Writes that wait for a journal that can be written: beyond them the oldest are lost.
MAX_TIMELINE, MAX_TIMELINES = 500, 4096  # Lines in one incident's timeline; incidents of which they are counted.


class JournalWriter:
    """One event loop owns it."""

    def __init__(self, journal: Journal, left_out: LeftOut):
        self._journal = journal
        self._left_out = left_out
        self.error: str | None = None  # Why the journal cannot be written, a sentence; None while it can.
        self._queued: deque[Callable[[], object]] = deque(maxlen=MAX_QUEUED)  # What the journal did not take, in order.
        self._together: list[Callable[[], object]] | None = None  # Written together, in case that it fails.
        self._timelines: dict[str, int] = {}  # Incident -> lines that this controller has written into its timeline.

    @property
    def is_behind(self) -> bool:
        """Whether anything waits that the journal did not take."""
        return bool(self._queued)

    def add_note(self, incident: Incident, text: str) -> None:
        """A line of the incident's timeline, if it has room."""
        lines = self._timelines.get(incident.id, 0)
        if lines >= MAX_TIMELINE:
            self._left_out.note("timeline", f"incident {incident.id}")
            return
        if len(self._timelines) >= MAX_TIMELINES:
            self._timelines.pop(next(iter(self._timelines)))
        self._timelines[incident.id] = lines + 1
        if lines + 1 == MAX_TIMELINE:
            text = f"further lines are left out: there are {MAX_TIMELINE}"
        at = clock.wall()
        self.write_or_queue(lambda: self._journal.add_note(incident.id, at, text))

    def write(self, work: Callable[[], object]) -> bool:
        """Writes to the journal; a journal that fails makes the controller blind, and it continues to watch."""
        try:
            work()
        except JournalError as error:
            self.failed(error)
            return False
        if not self._queued:
            self.error = None
        return True

    def write_or_queue(self, work: Callable[[], object]) -> None:
        """The same for what is written, and reported, later where it can't be now: in order, with the first tick."""
        if self._queued or not self.write(work):
            self._queued.append(work)
        elif self._together is not None:
            self._together.append(work)

    def together(self, work: Callable[[], object]) -> None:
        """Does `work`, whose writes wait for the disk once. If the journal fails, those made before are late."""
        written = self._together = []
        try:
            with self._journal.together():
                work()
        except JournalError as error:
            self.failed(error)
            self._queued.extendleft(reversed(written))  # they came before the one that failed
        finally:
            self._together = None

    def catch_up(self) -> None:
        """Writes what could not be written before; until it is, the controller stays blind."""
        if not self._queued:
            return
        try:
            with self._journal.together():
                for work in self._queued:
                    work()
        except JournalError as error:
            self.failed(error)
            return
        log.warning("the journal can be written again: %d records that waited are in it", len(self._queued))
        self._queued.clear()
        self.error = None

    def failed(self, error: JournalError) -> None:
        """A write, or a look into the journal, has failed."""
        if self.error is None:
            log.error("the journal cannot be written, nothing will be done until it can: %s", error)
        self.error = str(error)
