"""The events of nodes in the journal's database: see slurm_watchdog.model.node_events."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, plain, value_of
from slurm_watchdog.journal.tables import NODE_EVENTS
from slurm_watchdog.model.node_events import NodeEvent

SAVED: sa.BindParameter[str] = sa.bindparam("saved")
DROP = sa.delete(NODE_EVENTS).where(NODE_EVENTS.c.key == SAVED)
ADD = sa.insert(NODE_EVENTS)
COLUMNS = tuple(column for column in NODE_EVENTS.c if column.name != "id")


class SqlNodeEvents:
    """The events in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, event: NodeEvent) -> None:
        """Write an event as it is now; the one with the same key is replaced."""
        row = {name: getattr(event, name) for name in NodeEvent.__struct_fields__}
        row |= {name: plain(row[name]) for name in ("what", "withdrawn_why", "node", "place", "chain")}
        self._database.put((DROP, [{"saved": event.key}]), (ADD, [row]), key=f"node_event:{event.key}")

    def since(self, at: float) -> list[NodeEvent]:
        """All of this date and later, oldest first."""
        return self._found(NODE_EVENTS.c.at >= at)

    def of_node(self, names: Iterable[str], places: Iterable[str] = ()) -> list[NodeEvent]:
        """All of a node, by any of its names, and of these parts wherever they were, oldest first."""
        return self._found(sa.or_(NODE_EVENTS.c.node.in_(list(names)), NODE_EVENTS.c.place.in_(list(places))))

    def forget(self, before: float) -> int:
        """Drop what is older than this date; how many events that were."""
        return self._database.change(sa.delete(NODE_EVENTS).where(NODE_EVENTS.c.at < before))

    def _found(self, condition: sa.ColumnElement[bool]) -> list[NodeEvent]:
        query = sa.select(*COLUMNS).where(condition).order_by(NODE_EVENTS.c.at, NODE_EVENTS.c.id)
        return [value_of(row, NodeEvent) for row in self._database.rows(query)]
