"""Where jobs hung, in the journal's database: see slurm_watchdog.model.hang_place."""

from __future__ import annotations

import sqlalchemy as sa

from slurm_watchdog.journal.database import Database, plain, value_of
from slurm_watchdog.journal.tables import HANG_PLACES
from slurm_watchdog.model.hang_place import HangPlace

SAVED: sa.BindParameter[str] = sa.bindparam("saved")
DROP = sa.delete(HANG_PLACES).where(HANG_PLACES.c.incident_id == SAVED)
ADD = sa.insert(HANG_PLACES)


class SqlHangPlaces:
    """The places in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, place: HangPlace) -> None:
        """Write the place of an incident; one that is there is replaced."""
        row = {name: getattr(place, name) for name in HangPlace.__struct_fields__}
        row |= {name: plain(row[name]) for name in ("chain", "where", "node")}
        self._database.put((DROP, [{"saved": place.incident_id}]), (ADD, [row]), key=f"hang:{place.incident_id}")

    def since(self, at: float) -> list[HangPlace]:
        """All of this date and later, oldest first; what is older is dropped."""
        self._database.change(sa.delete(HANG_PLACES).where(HANG_PLACES.c.at < at))
        return [
            value_of(row, HangPlace) for row in self._database.rows(sa.select(HANG_PLACES).order_by(HANG_PLACES.c.at))
        ]
