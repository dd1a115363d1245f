"""Silences in the journal's database: see slurm_watchdog.model.silence."""

from __future__ import annotations

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, encode, plain
from slurm_watchdog.journal.tables import SILENCES
from slurm_watchdog.model.silence import Silence


class SqlSilences:
    """The silences in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, silence: Silence) -> None:
        """Write one down."""
        self._database.change(sa.insert(SILENCES).values(id=silence.id, document=encode(silence), ended_why=""))

    def open(self) -> list[Silence]:
        """Those that have not ended, in the order in which they were made."""
        query = sa.select(SILENCES.c.document).where(SILENCES.c.ended_at.is_(None)).order_by(SILENCES.c.number)
        return [self._database.decode(text, Silence) for (text,) in self._database.rows(query)]

    def end(self, silence_id: str, at: float, why: str) -> None:
        """It is over; one that is over already stays as it is."""
        which = SILENCES.c.id == silence_id, SILENCES.c.ended_at.is_(None)
        self._database.change(sa.update(SILENCES).where(*which).values(ended_at=at, ended_why=plain(why)))
