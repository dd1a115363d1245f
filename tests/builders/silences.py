"""Silences over incidents and a clock of a test, with what is announced for them."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.actions.silences import Silences
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.incidents import Incident


class Announced:
    """Keeps what is announced, each with the incident's id."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def opened(self, incident: Incident) -> None:
        self.said.append((incident.id, "opened"))

    def noted(self, incident: Incident, sentence: str) -> None:
        self.said.append((incident.id, sentence))


class Given:
    """Whatever a test changes: the open incidents, the date, the journal."""

    def __init__(self, incidents: Iterable[Incident] = (), now: float = 1000.0, journal: Journal | None = None) -> None:
        self.incidents, self.now = list(incidents), now
        self.journal, self.news = journal or Journal("sqlite://"), Announced()

    def silences(self) -> Silences:
        """Of a controller that starts now."""
        writer = JournalWriter(self.journal, LeftOut())
        return Silences(self.journal, writer, self.news, lambda: self.incidents, lambda: self.now)
