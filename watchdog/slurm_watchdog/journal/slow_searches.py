"""Searches for the nodes that make jobs slow, in the journal's database: see slurm_watchdog.model.slow_search."""

from __future__ import annotations

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, encode
from slurm_watchdog.journal.tables import SLOW_SEARCHES
from slurm_watchdog.model.slow_search import JobSearch

SAVED: sa.BindParameter[str] = sa.bindparam("saved")
DROP = sa.delete(SLOW_SEARCHES).where(SLOW_SEARCHES.c.job_id == SAVED)
ADD = sa.insert(SLOW_SEARCHES)


class SqlSlowSearches:
    """The searches in `database`, one a job. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, search: JobSearch) -> None:
        """Write the search of a job; what is there of it is replaced."""
        row = {"job_id": search.job_id, "updated_at": search.updated_at, "document": encode(search)}
        key = f"search:{search.job_id}"
        self._database.put((DROP, [{"saved": search.job_id}]), (ADD, [row]), key=key)

    def drop(self, job_id: str) -> None:
        """Forget the search of a job."""
        self._database.put((DROP, [{"saved": job_id}]), key=f"search:{job_id}")

    def all(self) -> list[JobSearch]:
        """All of them, those that were written first before the others."""
        rows = self._database.rows(sa.select(SLOW_SEARCHES.c.document).order_by(SLOW_SEARCHES.c.updated_at))
        return [self._database.decode(row.document, JobSearch) for row in rows]
