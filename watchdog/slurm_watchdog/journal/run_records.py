"""Runs of jobs, in the journal's database: see slurm_watchdog.model.run_record."""

from __future__ import annotations

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, encode, plain
from slurm_watchdog.journal.tables import JOB_RUNS
from slurm_watchdog.model.run_record import RunRecord

JOB: sa.BindParameter[str] = sa.bindparam("saved_job")
RESTARTS: sa.BindParameter[int] = sa.bindparam("saved_restarts")
DROP = sa.delete(JOB_RUNS).where(JOB_RUNS.c.job_id == JOB, JOB_RUNS.c.restarts == RESTARTS)
ADD = sa.insert(JOB_RUNS)


class SqlRunRecords:
    """The runs in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, record: RunRecord) -> None:
        """Write a run as it is now; the row of the same run is replaced."""
        job_id = plain(record.job_id)
        row = {
            "job_id": job_id,
            "restarts": record.restarts,
            "began_at": record.began_at,
            "seen_at": record.seen_at,
            "document": encode(record),
        }
        drop = {"saved_job": job_id, "saved_restarts": record.restarts}
        self._database.put((DROP, [drop]), (ADD, [row]), key=f"run:{job_id}:{record.restarts}")

    def between(self, since: float, until: float) -> list[RunRecord]:
        """All that ran at some time between these dates, in the order of their beginnings."""
        query = sa.select(JOB_RUNS.c.document).where(JOB_RUNS.c.seen_at >= since, JOB_RUNS.c.began_at <= until)
        return self._all(query.order_by(JOB_RUNS.c.began_at, JOB_RUNS.c.job_id))

    def of_job(self, job_id: str) -> list[RunRecord]:
        """All of one job."""
        return self._all(sa.select(JOB_RUNS.c.document).where(JOB_RUNS.c.job_id == job_id))

    def drop_before(self, at: float) -> None:
        """Forget runs that were over by this date."""
        self._database.change(sa.delete(JOB_RUNS).where(JOB_RUNS.c.seen_at < at))

    def _all(self, query: sa.Select[tuple[str]]) -> list[RunRecord]:
        return [self._database.decode(row.document, RunRecord) for row in self._database.rows(query)]
