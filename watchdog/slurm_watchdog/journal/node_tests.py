"""Tests of nodes that the controller starts, in the journal's database: see slurm_watchdog.model.node_test."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, encode
from slurm_watchdog.journal.tables import NODE_TESTS
from slurm_watchdog.model.node_test import NodeTest

SAVED: sa.BindParameter[str] = sa.bindparam("saved")
DROP = sa.delete(NODE_TESTS).where(NODE_TESTS.c.name == SAVED)
ADD = sa.insert(NODE_TESTS)
KEPT_S: Final = 90 * 86400.0
"""What came of a test is among the events of its node, for longer."""


class SqlNodeTests:
    """The tests in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def intend(self, test: NodeTest) -> None:
        """Write down that a test is about to be started; on the disk when this returns. Old ones are forgotten."""
        old = sa.delete(NODE_TESTS).where(NODE_TESTS.c.ended_at < test.at - KEPT_S)
        with self._database.transaction() as sql:
            sql.execute(old)
            sql.execute(ADD, [_row(test)])

    def save(self, test: NodeTest) -> None:
        """Write a test as it is now; the row of the same name is replaced."""
        self._database.put((DROP, [{"saved": test.name}]), (ADD, [_row(test)]), key=f"node test:{test.name}")

    def open(self) -> list[NodeTest]:
        """Those that are not over, oldest first."""
        return self._found(NODE_TESTS.c.ended_at.is_(None))

    def since(self, at: float) -> list[NodeTest]:
        """Those that began then or later, oldest first."""
        return self._found(NODE_TESTS.c.at >= at)

    def _found(self, condition: sa.ColumnElement[bool]) -> list[NodeTest]:
        query = sa.select(NODE_TESTS.c.document).where(condition).order_by(NODE_TESTS.c.at, NODE_TESTS.c.name)
        return [self._database.decode(row.document, NodeTest) for row in self._database.rows(query)]


def _row(test: NodeTest) -> dict[str, object]:
    return {"name": test.name, "at": test.at, "ended_at": test.ended_at, "document": encode(test)}
