"""Values of one type in one table of the journal, as a JSON document beside the columns that are searched, or column by
column. Each method is one transaction and raises JournalError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, Write, encode, plain, value_of

V = TypeVar("V", bound=msgspec.Struct)


class Documents(Generic[V]):
    """The values of `kind` in `table`, of which `key` names one. A field that has a column of its name is in it; where
    there is a column `document`, the whole value is in there. They are listed in the `order` of columns."""

    def __init__(self, database: Database, table: sa.Table, kind: type[V], *key: str, order: str = "at") -> None:
        self.c = table.c
        """The columns, for conditions."""
        self._database, self._table, self._kind, self._key = database, table, kind, key
        self._order = [table.c[name] for name in order.split()]
        self._fields = [name for name in kind.__struct_fields__ if name in table.c]
        self._whole = "document" in table.c
        self._insert = sa.insert(table)
        self._drop = sa.delete(table).where(*(table.c[name] == sa.bindparam(f"saved_{name}") for name in key))

    def add(self, value: V) -> None:
        """Write one that is new; the database numbers it where it has no number. The same key twice is an error."""
        row = {name: each for name, each in self._row(value).items() if each is not None}
        self._database.put((self._insert, [row]))

    def save(self, value: V) -> None:
        """Write one as it is now; the one with the same key is replaced."""
        key = [self._table.name, *(getattr(value, name) for name in self._key)]
        self._database.put(*self.writes(value), key=str(key))

    def writes(self, value: V) -> tuple[Write, ...]:
        """What `save` does."""
        row = self._row(value)
        return (self._drop, [{f"saved_{name}": row[name] for name in self._key}]), (self._insert, [row])

    def find(self, *conditions: sa.ColumnElement[bool], newest: int | None = None) -> list[V]:
        """All that meet these conditions, oldest first; or the `newest` so many, newest first."""
        query = sa.select(self.c.document if self._whole else self._table).where(*conditions)
        order = self._order if newest is None else [column.desc() for column in self._order]
        rows = self._database.rows(query.order_by(*order).limit(newest))
        if self._whole:
            return [self._database.decode(text, self._kind) for (text,) in rows]
        return [value_of(row, self._kind) for row in rows]

    def of(self, **values: Iterable[object]) -> list[V]:
        """Those that have one of these values in one of the columns."""
        return self.find(sa.or_(*(self.c[name].in_(list(some)) for name, some in values.items())))

    def open(self) -> list[V]:
        """Those that are not over."""
        return self.find(self.c.ended_at.is_(None))

    def since(self, at: float) -> list[V]:
        """Those of this date and later."""
        return self.find(self.c.at >= at)

    def prune(self, before: float, column: str = "at") -> int:
        """Remove those with an earlier date in `column`; how many these were."""
        return self._database.change(sa.delete(self._table).where(self.c[column] < before))

    def _row(self, value: V) -> dict[str, Any]:
        row = {name: getattr(value, name) for name in self._fields}
        row = {name: plain(str(each)) if isinstance(each, str) else each for name, each in row.items()}
        return row | {"document": encode(value)} if self._whole else row
