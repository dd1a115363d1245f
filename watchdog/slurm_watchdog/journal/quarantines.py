"""Nodes in quarantine, in the journal's database: see slurm_watchdog.model.quarantine."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, plain, value_of
from slurm_watchdog.journal.tables import QUARANTINES
from slurm_watchdog.model.quarantine import Quarantine, QuarantineState


class SqlQuarantines:
    """The quarantines in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def intend(self, node: str, incident_id: str, reason: str, at: float, reservation: str | None = None) -> None:
        """Write down that a node is about to be drained, or kept in `reservation`. One that is in quarantine already
        stays as it is."""
        row = {"node": node, "incident_id": incident_id, "reason": plain(reason), "at": at, "reservation": reservation}
        open_ones = sa.select(QUARANTINES.c.id).where(QUARANTINES.c.node == node, QUARANTINES.c.ended_at.is_(None))
        with self._database.transaction() as sql:
            if sql.execute(open_ones).first() is None:
                more = {"state": QuarantineState.INTENDED.value, "ended_why": ""}
                sql.execute(sa.insert(QUARANTINES).values(row | more))

    def drained(self, quarantine_id: int, reason_at: float | None) -> None:
        """Slurm has our drain, since this time; or our reservation."""
        values = {"state": QuarantineState.DRAINED.value, "reason_at": reason_at}
        self._change(quarantine_id, values)

    def end(self, quarantine_id: int, state: QuarantineState, at: float, why: str) -> None:
        """It is over."""
        self._change(quarantine_id, {"state": state.value, "ended_at": at, "ended_why": plain(why)})

    def open(self) -> list[Quarantine]:
        """Those that are not over, oldest first."""
        return self._found(QUARANTINES.c.ended_at.is_(None))

    def of_node(self, node: str) -> list[Quarantine]:
        """All of a node, oldest first."""
        return self._found(QUARANTINES.c.node == node)

    def _change(self, quarantine_id: int, values: Mapping[str, object]) -> None:
        self._database.change(sa.update(QUARANTINES).where(QUARANTINES.c.id == quarantine_id).values(dict(values)))

    def _found(self, condition: sa.ColumnElement[bool]) -> list[Quarantine]:
        rows = self._database.rows(sa.select(QUARANTINES).where(condition).order_by(QUARANTINES.c.id))
        return [value_of(row, Quarantine) for row in rows]
