"""The database below the journal: transactions that are on the disk when they are over, what its failures mean, and
values of one type in one table."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa

from slurm_watchdog.base.structs import map_texts
from slurm_watchdog.journal.error import JournalError

__all__ = ["Database", "JournalError", "encode", "open_engine", "plain", "value_of"]

BUSY_MS = 5000
PRIVATE_MODE = 0o600
BESIDE = ("-wal", "-shm", "-journal")  # What SQLite keeps beside a database, made with the database's own mode.

NO_URL = "The journal's address is not an SQLAlchemy URL; correct controller.journal_url."
WAITS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 5000,
    "options": "-c statement_timeout=20s -c lock_timeout=5s -c idle_in_transaction_session_timeout=4s",
}
"""Of PostgreSQL (its manual, 20.11 and 34.1.2), in its own units: seconds, milliseconds. A server that is gone holds
no one up for long, and a controller that was stopped in the middle of a transaction holds no lock for long."""

log = logging.getLogger(__name__)

V = TypeVar("V")
D = TypeVar("D", bound=msgspec.Struct)
Row = dict[str, Any]
Write = tuple[sa.Executable, Sequence[Row]]
"""A statement that takes one row, and rows. The statement is a constant: rows of the same one go out together."""


class Database:
    """The database at `url`, a SQLAlchemy address, for one thread. Every method raises JournalError."""

    def __init__(
        self,
        url: str,
        busy_ms: int = BUSY_MS,
        *,
        read_only: bool = False,
        check: Callable[[sa.Connection], None] | None = None,
    ) -> None:
        """`read_only`: holds up no one who writes, and is refused what would change anything. `check`: first in
        every transaction; what it raises ends it."""
        self._check = check
        address = address_of(url)
        self.where = address.render_as_string(hide_password=True)
        self._open: sa.Connection | None = None  # Inside of `together`: its transaction.
        self._waiting: dict[sa.Executable, list[Row]] = {}  # What `put` was given, by statement, in that order.
        self._keys: set[str] = set()
        self._failed: JournalError | None = None
        try:
            keep_private(address)
            self.engine = open_engine(address, busy_ms, read_only=read_only)
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            raise explain(error, self.where) from error

    def close(self) -> None:
        """Let go of it."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """One transaction: committed at the end, rolled back by any exception; inside of `together` a part of that."""
        try:
            if self._open is not None:
                self._write_waiting(self._open)
                with self._open.begin_nested():
                    yield self._open
                return
            with self.engine.begin() as connection:
                if self._check is not None:
                    self._check(connection)
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise explain(error, self.where) from error

    def change(self, statement: sa.Executable) -> int:
        """One statement in a transaction; how many rows it changed."""
        with self.transaction() as sql:
            return int(sql.execute(statement).rowcount)

    def rows(self, query: sa.Executable) -> Sequence[Any]:
        """What a query finds."""
        with self.transaction() as sql:
            return sql.execute(query).all()

    @contextmanager
    def together(self) -> Iterator[None]:
        """All that is written in the block is committed at its end, or nothing of it if any of it fails: see `put`."""
        with self.transaction() as connection:
            self._open = connection
            try:
                yield
                self._write_waiting(connection)
            finally:
                self._open = self._failed = None
                self._waiting, self._keys = {}, set()

    def put(self, *writes: Write, key: str | None = None) -> None:
        """Write rows, each with a statement that takes one; all of it in one transaction.

        Inside of `together` they wait for its end, or until something is read, and go out with all others of
        the same statement at once: thousands of statements of their own would take seconds. What was written
        before with the same `key` goes out first.
        """
        if self._open is None:
            with self.transaction() as sql:
                for statement, rows in writes:
                    if rows:
                        sql.execute(statement, list(rows))
            return
        if key in self._keys:
            self._write_waiting(self._open)
        if key is not None:
            self._keys.add(key)
        for statement, rows in writes:
            self._waiting.setdefault(statement, []).extend(rows)

    def _write_waiting(self, sql: sa.Connection) -> None:
        """A failure fails the whole block, even if code inside of it continues."""
        if self._failed is not None:
            raise self._failed
        waiting, self._waiting, self._keys = self._waiting, {}, set()
        try:
            for statement, rows in waiting.items():
                if rows:
                    sql.execute(statement, rows)
        except sa.exc.SQLAlchemyError as error:
            self._failed = explain(error, self.where)
            raise self._failed from error

    def decode(self, text: str, kind: type[Any]) -> Any:
        """The value of a document."""
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> JournalError:
        """What to say of a record that makes no sense."""
        return JournalError(
            f"A record in the journal {self.where} cannot be read ({error}); restore it from a backup, or move it away."
        )


ADVICE = (
    ("UNIQUE constraint failed: decisions", "has this decision already; decisions don't change"),
    ("decisions_pkey", "has this decision already; decisions don't change"),
    (
        "not a database",
        "is not an SQLite database or is damaged; move it away or restore a backup, then start again",
    ),
    ("malformed", "is damaged; keep a copy, restore a backup or move it away, then start again"),
    ("disk is full", "has no room: its disk is full; free some, nothing is done until then"),
    ("readonly", "is read-only; check the mount and the owner of the file and its directory"),
    ("unable to open", "cannot be opened; its directory must exist and be writable for the controller"),
    ("disk I/O error", "cannot be read or written: its disk reports errors; check it before anything else"),
    ("locked", "is in use by another process; only one controller may run"),
)  # What SQLite says, and what it means for the reader.


def explain(error: Exception, where: str) -> JournalError:
    """What a failure of the database at `where` means."""
    text = str(getattr(error, "orig", None) or error).splitlines()[0][:300]
    for sign, advice in ADVICE:
        if sign in text:
            return JournalError(f"The journal {where} {advice} ({text}).")
    return JournalError(f"The journal {where} failed: {text}. Nothing is done until it works again.")


def encode(value: Any) -> str:
    """The JSON document of a value. Raises what msgspec raises for a value that is none."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a lone surrogate: no database keeps it
        return msgspec.json.encode(map_texts(msgspec.to_builtins(value), plain)).decode()


def value_of(row: Any, kind: type[V], **decoded: Any) -> V:
    """The value that a row holds field by field, some of them `decoded` already."""
    columns = {str(name): column for name, column in row._mapping.items()}  # SQLAlchemy's names are no plain str
    return msgspec.convert(columns | decoded, kind)


def plain(text: str) -> str:
    """`text` as every database keeps it: SQLite takes no lone surrogates, PostgreSQL no NUL."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "?").encode(errors="replace").decode()


def keep_private(url: sa.URL) -> None:
    """The file of a SQLite journal, and those beside it, are its owner's alone: it holds lines of everybody's logs.

    One that an older release left readable for a group is tightened; one that does not exist is made so. What
    cannot be done is logged: the journal may still be good.
    """
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:") or "uri" in url.query:
        return
    path = str(url.database)
    with suppress(OSError):  # opening it afterwards says what is wrong
        os.close(private_file(path))
    for name in (path, *(path + ending for ending in BESIDE)):
        try:
            if os.stat(name).st_mode & 0o077:
                os.chmod(name, PRIVATE_MODE)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.error("%s may be read by others, and its mode cannot be changed: %s; set it to 0600", name, error)


def private_file(path: str) -> int:
    """The descriptor of this file, open to read and write; if it is not there it is made. What root makes
    (`controller --once`) belongs to the owner of its directory: the service's user could not open it otherwise, as
    SQLite does with the files beside a journal. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
    except FileExistsError:
        return os.open(path, flags)
    if os.geteuid() == 0:
        owner = os.stat(os.path.dirname(path) or ".")
        os.fchown(fd, owner.st_uid, owner.st_gid)
    return fd


def address_of(url: str) -> sa.URL:
    """The address of a journal. Raises JournalError for none."""
    try:
        return sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise JournalError(NO_URL) from error


def open_engine(url: sa.URL, busy_ms: int = BUSY_MS, *, read_only: bool = False) -> sa.Engine:
    """An engine for one thread. For SQLite: durable, waiting for locks, transactions that begin where we say."""
    backend = url.get_backend_name()
    if backend != "sqlite":
        return sa.create_engine(url, pool_pre_ping=True, connect_args=WAITS if backend == "postgresql" else {})
    engine = sa.create_engine(url, poolclass=sa.pool.StaticPool)

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, record: Any) -> None:
        # The driver would begin transactions by itself, and not before reads; we do it below.
        connection.isolation_level = None
        for pragma in (f"busy_timeout={busy_ms}", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}").close()
        if read_only:
            connection.execute("PRAGMA query_only=ON").close()

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        # IMMEDIATE: a transaction that only later turned to writing could fail halfway with "locked".
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


class Documents(Generic[D]):
    """The values of `kind` in `table`, of which `key` names one. A field that has a column of its name is in it; where
    there is a column `document`, the whole value is in there. They are listed in the `order` of columns."""

    def __init__(self, database: Database, table: sa.Table, kind: type[D], *key: str, order: str = "at") -> None:
        self.c = table.c  # The columns, for conditions.
        self._database, self._table, self._kind, self._key = database, table, kind, key
        self._order = [table.c[name] for name in order.split()]
        self._fields = [name for name in kind.__struct_fields__ if name in table.c]
        self._whole = "document" in table.c
        self._insert = sa.insert(table)
        self._drop = sa.delete(table).where(*(table.c[name] == sa.bindparam(f"saved_{name}") for name in key))

    def add(self, value: D) -> None:
        """Write one that is new; the database numbers it where it has no number. The same key twice is an error."""
        row = {name: each for name, each in self._row(value).items() if each is not None}
        self._database.put((self._insert, [row]))

    def save(self, value: D) -> None:
        """Write one as it is now; the one with the same key is replaced."""
        key = [self._table.name, *(getattr(value, name) for name in self._key)]
        self._database.put(*self.writes(value), key=str(key))

    def writes(self, value: D) -> tuple[Write, ...]:
        """What `save` does."""
        row = self._row(value)
        return (self._drop, [{f"saved_{name}": row[name] for name in self._key}]), (self._insert, [row])

    def find(self, *conditions: sa.ColumnElement[bool], newest: int | None = None) -> list[D]:
        """All that meet these conditions, oldest first; or the `newest` so many, newest first."""
        query = sa.select(self.c.document if self._whole else self._table).where(*conditions)
        order = self._order if newest is None else [column.desc() for column in self._order]
        rows = self._database.rows(query.order_by(*order).limit(newest))
        if self._whole:
            return [self._database.decode(text, self._kind) for (text,) in rows]
        return [value_of(row, self._kind) for row in rows]

    def of(self, **values: Iterable[object]) -> list[D]:
        """Those that have one of these values in one of the columns."""
        return self.find(sa.or_(*(self.c[name].in_(list(some)) for name, some in values.items())))

    def open(self) -> list[D]:
        """Those that are not over."""
        return self.find(self.c.ended_at.is_(None))

    def since(self, at: float) -> list[D]:
        """Those of this date and later."""
        return self.find(self.c.at >= at)

    def prune(self, before: float, column: str = "at") -> int:
        """Remove those with an earlier date in `column`; how many these were."""
        return self._database.change(sa.delete(self._table).where(self.c[column] < before))

    def _row(self, value: D) -> dict[str, Any]:
        row = {name: getattr(value, name) for name in self._fields}
        row = {name: plain(str(each)) if isinstance(each, str) else each for name, each in row.items()}
        return row | {"document": encode(value)} if self._whole else row
