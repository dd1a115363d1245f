"""Which controller is the active one: two would decide about the same jobs, each without the other.

On a journal in a file it is the one that holds a lock; of several on one PostgreSQL the one that renews a row, with a
number that grows. The number (epoch) is a fencing token: every transaction of the journal locks the row of its own
epoch first, so that one of a controller that was replaced fails, however late it comes; and no one is replaced in the
middle of one.
Whether a lease has expired is asked of the database's clock alone. The holder measures from before each renewal
on its own monotonic clock, and ends `MARGIN_S` before anybody else may begin.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from slurm_watchdog.base import clock
from slurm_watchdog.journal.database import Database, private_file
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.tables import refuse_newer

log = logging.getLogger(__name__)

LEASE_S = 6.0  # A holder that was not heard for so long is replaced: with the start of its successor, within 10 s.
MARGIN_S = 1.5
RENEW_EVERY_S = 1.0
CHECK_EVERY_S = 0.1
EXIT_CODE = 1  # systemd starts it again, and it is the standby.

META = sa.MetaData()
LEASE = sa.Table(
    "controller_lease",
    META,
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.String(255), nullable=False),
    sa.Column("renewed_at", sa.DateTime(timezone=True), nullable=False),
)  # One row. Not among the journal's tables: a journal on SQLite has none.
DATABASE_NOW = sa.func.clock_timestamp()
FENCE = sa.select(LEASE.c.epoch).with_for_update(read=True, key_share=True)
"""FOR KEY SHARE: held up by a change of the epoch, and in the way of it; not of a renewal."""


@dataclass(frozen=True)
class Held:
    """What the row says."""

    epoch: int
    holder: str
    age_s: float


class Alone:
    """Holds the SQLite journal at `url` until it is closed or this process ends. Raises JournalError if another process
    holds it, OSError if that cannot be found out.

    The lock is POSIX's: no child inherits it, so that one that hangs in the kernel keeps no later controller out.
    """

    def __init__(self, url: str):
        address = sa.make_url(url)
        path = address.database
        self._fd: int | None = None
        if path in (None, "", ":memory:") or "uri" in address.query:
            return
        self._fd = private_file(f"{path}.lock")
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise JournalError(
                f"Another controller has the journal {path}: stop it first, or set another controller.state_directory."
            ) from error

    def close(self) -> None:
        """Lets the next one have it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Lease:
    """The lease in the database at `url`, for the controller `name`. Every method raises JournalError."""

    def __init__(self, url: str, name: str, lease_s: float = LEASE_S):
        self.name, self.lease_s = name, lease_s
        self.epoch = 0  # Ours; 0: not held.
        self.until = 0.0  # Until then on our monotonic clock we are the active one, unless it is renewed.
        self._database = Database(url)
        self._ended = threading.Event()

    def prepare(self) -> None:
        """Makes the table and its row. Two controllers that start at once may both do so."""
        with self._database.transaction() as sql:
            sql.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(LEASE.name))))
            META.create_all(sql)
            if sql.execute(sa.select(LEASE.c.epoch)).first() is None:
                sql.execute(sa.insert(LEASE).values(epoch=1, holder="", renewed_at=DATABASE_NOW))

    def read(self) -> Held:
        """Who has it now."""
        age = sa.func.extract("epoch", DATABASE_NOW - LEASE.c.renewed_at).cast(sa.Float)
        with self._database.transaction() as sql:
            row = sql.execute(sa.select(LEASE.c.epoch, LEASE.c.holder, age.label("age_s"))).one()
        return Held(row.epoch, row.holder, row.age_s)

    def take(self) -> bool:
        """Takes it if no one has it, or who has it was not heard for `lease_s`.

        Raises NewerRelease where the journal is one of a later release: this one could not open it, and no one would
        be the active one meanwhile.
        """
        expired = LEASE.c.renewed_at < DATABASE_NOW - sa.func.make_interval(0, 0, 0, 0, 0, 0, self.lease_s)
        row = {"epoch": LEASE.c.epoch + 1, "holder": self.name, "renewed_at": DATABASE_NOW}
        free = sa.or_(LEASE.c.holder == "", expired)
        asked_at = clock.monotonic()
        with self._database.transaction() as sql:
            refuse_newer(sql, self._database.where)
            epoch = sql.execute(sa.update(LEASE).where(free).values(row).returning(LEASE.c.epoch)).scalar()
        if epoch is None:
            return False
        self.epoch, self.until = int(epoch), asked_at + self.lease_s - MARGIN_S
        return True

    def renew(self) -> bool:
        """False: another controller has taken it."""
        asked_at = clock.monotonic()
        if not self._database.change(
            sa.update(LEASE).where(LEASE.c.epoch == self.epoch).values(renewed_at=DATABASE_NOW)
        ):
            self.until = 0.0
            return False
        self.until = asked_at + self.lease_s - MARGIN_S
        return True

    def age_s(self) -> float:
        """Since the last renewal of ours."""
        return clock.monotonic() - (self.until + MARGIN_S - self.lease_s)

    def is_held(self) -> bool:
        """Whether we are the active one at this moment."""
        return clock.monotonic() < self.until

    def confirm(self) -> bool:
        """Whether the database says so, too: asked, in a thread, before each command that changes something in Slurm.
        The clock of a virtual machine may not have counted while it was paused."""
        try:
            return self.renew() and self.is_held()
        except JournalError as error:
            log.error("whether this is the active controller is not known: %s", error)
            return False

    def check(self, sql: sa.Connection) -> None:
        """First in every transaction of the journal: no one replaces us in it, and it fails if someone has."""
        if not self.is_held() or sql.execute(FENCE.where(LEASE.c.epoch == self.epoch)).first() is None:
            raise JournalError("Another controller is, or may be, the active one by now; this one does nothing more.")

    def keep(self, end: Callable[[int], None] = os._exit) -> None:
        """From now on a thread renews it, and another one ends this process when that has not worked in time.

        Whatever hangs in the process, or stopped it, holds neither up; what the process was about to do is in the
        journal, for the next one.
        """
        threading.Thread(target=self._renew_always, name="lease", daemon=True).start()
        threading.Thread(target=self._watch, args=(end,), name="lease-watch", daemon=True).start()

    def _renew_always(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S):
            try:
                if not self.renew():
                    return
            except JournalError as error:
                log.error("the lease of the active controller cannot be renewed: %s", error)

    def _watch(self, end: Callable[[int], None]) -> None:
        while self.is_held():
            if self._ended.wait(CHECK_EVERY_S):
                return
        log.critical("this controller is not, or may not be, the active one any more: it ends, to be the standby")
        end(EXIT_CODE)

    def close(self) -> None:
        """At our end: the standby need not wait. What cannot be written expires."""
        self._ended.set()
        if self.epoch:
            try:
                self._database.change(sa.update(LEASE).where(LEASE.c.epoch == self.epoch).values(holder=""))
            except JournalError as error:
                log.warning("the lease is left to expire: %s", error)
        self.until = 0.0
        self._database.close()
