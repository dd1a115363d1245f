"""Silences while they hold: who is not notified of what, and what is said when one ends.

A silence quiets messages and alerts. It changes nothing in what is judged, shown or done: a pause stops actions.
One event loop owns this; the journal has each silence before it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.config.policy import Exceptions, OfJob, values_for
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.incidents import Incident, Silence
from slurm_watchdog.notify.dispatcher import Notifier

BY_FILE: Final = "the configuration"


class Silences:
    """See the module. Raises JournalError where it says so."""

    def __init__(
        self,
        journal: Journal,
        writer: JournalWriter,
        news: Notifier,
        incidents: Callable[[], Iterable[Incident]],
        wall: Callable[[], float] = clock.wall,
        exceptions: Exceptions = (),
        job_of: Callable[[str], OfJob | None] = lambda job_id: None,
    ):
        """`incidents`: the open ones; `exceptions`: of the configuration, which may silence, too. Raises
        JournalError."""
        self._quiet = tuple(each for each in exceptions if "silence" in each.given())
        self._job_of, self._started_at = job_of, wall()
        self._journal, self._writer, self._news, self._incidents, self._wall = journal, writer, news, incidents, wall
        self._open = journal.silences.open()

    def listed(self) -> tuple[Silence, ...]:
        """Those that hold, oldest first."""
        return tuple(self._open)

    def silence_of(self, incident: Incident) -> Silence | None:
        """The silence that holds for an incident."""
        return next((each for each in self._open if each.covers(incident)), None) or self._configured(incident)

    def _configured(self, incident: Incident) -> Silence | None:
        """The configuration's, where it holds for every job of the incident."""
        jobs = [self._job_of(job_id) for job_id in incident.job_ids] or [None]
        found = [
            values_for(self._quiet, job, incident.kind, incident.named_nodes)[0].get("silence", "") for job in jobs
        ]
        if not self._quiet or not all(found):
            return None
        return Silence(id="", by=BY_FILE, at=self._started_at, until=math.inf, reason=found[0])

    def add(self, silence: Silence) -> None:
        """It holds from now on, and all who were notified of what it covers are notified of it. Raises JournalError."""
        why = f": {silence.reason}" if silence.reason else ""
        sentence = f"silenced by {silence.by} until {_date(silence.until)} (silence {silence.id}){why}"
        self._open.append(silence)
        try:
            with self._journal.together():
                self._journal.silences.save(silence)
                for incident in self._covered(silence):
                    self._journal.add_note(incident.id, silence.at, sentence)
                    self._news.noted(incident, sentence)
        except JournalError:
            self._open.remove(silence)
            raise

    def end(self, silence: Silence, why: str) -> None:
        """It holds no longer; what it covered and still fires is announced, with its end or not at all. Raises
        JournalError."""
        now = self._wall()
        self._open.remove(silence)
        try:
            with self._journal.together():
                self._journal.silences.save(replace(silence, ended_at=now, ended_why=why))
                for incident in self._covered(silence):
                    self._journal.add_note(incident.id, now, f"silence {silence.id} is over: {why}")
                    if is_announced(incident):
                        self._news.opened(incident)
        except JournalError:
            self._open.append(silence)
            raise

    def expire(self) -> None:
        """Ends those whose time is over. A journal that fails is asked again with the next tick."""
        now = self._wall()
        for each in self.listed():
            if each.is_over(now) and not self._writer.write(lambda each=each: self.end(each, "its time is over")):  # type: ignore[misc]
                return

    def words_of(self, incident: Incident) -> str:
        """Who has silenced an incident; empty: no person."""
        silence = self.silence_of(incident)
        if silence is None:
            return ""
        end = f": {silence.reason}" if silence.by == BY_FILE else f" until {_date(silence.until)}"
        return f"silenced by {silence.by}{end}"

    def _covered(self, silence: Silence) -> list[Incident]:
        return [each for each in self._incidents() if silence.covers(each)]


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
