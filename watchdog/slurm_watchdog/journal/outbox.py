"""Messages that wait to be sent, and the threads they belong to, in the journal's database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.journal.database import Database, encode, value_of
from slurm_watchdog.journal.tables import OUTBOX, THREADS


class OutboxItem(Struct):
    """One message that waits to be sent."""

    id: int
    channel: str
    incident_id: str
    payload: dict[str, Any]
    added_at: float


ADD = sa.insert(OUTBOX)


class SqlOutbox:
    """The outbox in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, channel: str, incident_id: str, payload: dict[str, Any], at: float) -> None:
        """Put a message up for sending; it stays until it is done, restarts included."""
        row = {"channel": channel, "incident_id": incident_id, "payload": encode(payload), "added_at": at}
        new = {"done": False, "attempts": 0, "retry_at": 0.0, "error": ""}
        self._database.put((ADD, [row | new]))

    def pending(self, limit: int, channel: str | None = None, after: int = 0) -> list[OutboxItem]:
        """The oldest messages (of one channel) that are not done, in their order; those with an id above `after`."""
        query = sa.select(OUTBOX).where(OUTBOX.c.done.is_(False), OUTBOX.c.id > after)
        if channel is not None:
            query = query.where(OUTBOX.c.channel == channel)
        query = query.order_by(OUTBOX.c.id).limit(limit)
        return [
            value_of(row, OutboxItem, payload=self._database.decode(row.payload, dict[str, Any]))
            for row in self._database.rows(query)
        ]

    def first(self, channel: str) -> OutboxItem | None:
        """The oldest message of a channel that is not done."""
        return next(iter(self.pending(1, channel)), None)

    def waiting_channels(self) -> list[str]:
        """Channels that have messages which are not done."""
        query = sa.select(OUTBOX.c.channel).where(OUTBOX.c.done.is_(False)).distinct()
        return sorted(channel for (channel,) in self._database.rows(query))

    def backlog(self, channel: str) -> tuple[int, float | None]:
        """How many messages of a channel are not done, and the date of the oldest; None: there is none."""
        query = sa.select(sa.func.count(), sa.func.min(OUTBOX.c.added_at)).where(*_undone(channel))
        ((number, oldest),) = self._database.rows(query)
        return int(number), oldest

    def done_all(self, channel: str, item_ids: Sequence[int]) -> None:
        """None of these needs more sending."""
        with self._database.transaction() as sql:
            for start in range(0, len(item_ids), 500):
                some = OUTBOX.c.id.in_(item_ids[start : start + 500])
                sql.execute(sa.update(OUTBOX).where(OUTBOX.c.channel == channel, some).values(done=True))

    def done_through(self, channel: str, item_id: int) -> None:
        """None of a channel's messages up to this one needs more sending."""
        self._database.change(sa.update(OUTBOX).where(*_undone(channel), OUTBOX.c.id <= item_id).values(done=True))

    def expire(self, channel: str, before: float) -> int:
        """Give up messages of a channel that were added before this date; returns how many."""
        old = sa.update(OUTBOX).where(*_undone(channel), OUTBOX.c.added_at < before)
        return self._database.change(old.values(done=True))

    def forget(self, before: float) -> None:
        """Remove messages and threads from before this date, sent or not."""
        with self._database.transaction() as sql:
            sql.execute(sa.delete(OUTBOX).where(OUTBOX.c.added_at < before))
            sql.execute(sa.delete(THREADS).where(THREADS.c.at < before))

    def keep_thread(self, channel: str, incident_id: str, thread: str, at: float) -> None:
        """Remember the thread in which messages about an incident continue."""
        key = {"channel": channel, "incident_id": incident_id}
        with self._database.transaction() as sql:
            sql.execute(sa.delete(THREADS).where(*(THREADS.c[name] == value for name, value in key.items())))
            sql.execute(sa.insert(THREADS).values(**key, thread=thread, at=at))

    def thread_of(self, channel: str, incident_id: str) -> str | None:
        """The thread of an incident in a channel, None if it has none."""
        query = sa.select(THREADS.c.thread).where(THREADS.c.channel == channel, THREADS.c.incident_id == incident_id)
        found = self._database.rows(query)
        return found[0].thread if found else None


def _undone(channel: str) -> tuple[sa.ColumnElement[bool], ...]:
    """The messages of a channel that are not done."""
    return OUTBOX.c.channel == channel, OUTBOX.c.done.is_(False)
