"""Evidence of incidents in the journal's database: documents, compressed if they are large, in letters that every
database keeps; which collection they came from, and who shares it."""

from __future__ import annotations

import base64
import binascii
import zlib

import sqlalchemy as sa

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.journal.database import Database
from slurm_watchdog.journal.tables import EVIDENCE, EVIDENCE_SHARED

ADD = sa.insert(EVIDENCE)
SMALL_BYTES = 4096  # What is smaller stays readable.
MARK = "zlib:"  # No JSON document begins so.
LEVEL = 3  # A node's three dumps of 8 ranks: 2 MiB become some 100 kB in 15 ms.
MAX_BYTES = 64 << 20


class Piece(Struct):
    """One piece of evidence, without its document."""

    number: int
    at: float  # Date at which it was written.
    kind: str  # `job`, `node` or `diagnosis`.
    stored_with: str  # Id of the incident from which its document is read, and whose access rules hold for it.


class SqlEvidence:
    """The evidence in `database`. Each method is one transaction and raises JournalError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, incident_id: str, at: float, kind: str, packed: str, collection: str | None = None) -> None:
        """Keep a document that `pack` has packed. `kind`: see Piece; `collection`: the id of the one
        it came from."""
        row = {"incident_id": incident_id, "at": at, "kind": kind, "document": packed, "collection": collection}
        self._database.put((ADD, [row]))

    def share(self, incident_id: str, collection: str, stored_with: str) -> None:
        """A collection stored with another incident is evidence of this one, too: what it has, and will have."""
        row = {"incident_id": incident_id, "collection": collection, "stored_with": stored_with}
        same = [EVIDENCE_SHARED.c[name] == row[name] for name in ("incident_id", "collection")]
        with self._database.transaction() as sql:
            if sql.execute(sa.select(EVIDENCE_SHARED.c.stored_with).where(*same)).first() is None:
                sql.execute(sa.insert(EVIDENCE_SHARED).values(row))

    def pieces(self, incident_id: str) -> list[Piece]:
        """The evidence of an incident in the order it was added, that of collections which it shares with
        others included; without the documents: those of a thousand ranks are tens of megabytes."""
        shared = sa.and_(
            EVIDENCE.c.incident_id == EVIDENCE_SHARED.c.stored_with,
            EVIDENCE.c.collection == EVIDENCE_SHARED.c.collection,
        )
        columns = (EVIDENCE.c.id, EVIDENCE.c.at, EVIDENCE.c.kind, EVIDENCE.c.incident_id)
        own = sa.select(*columns).where(EVIDENCE.c.incident_id == incident_id)
        others = (
            sa.select(*columns)
            .join(EVIDENCE_SHARED, shared)
            .where(EVIDENCE_SHARED.c.incident_id == incident_id, EVIDENCE.c.incident_id != incident_id)
        )
        with self._database.transaction() as sql:
            rows = [*sql.execute(own), *sql.execute(others)]
        return [
            Piece(number=row.id, at=row.at, kind=row.kind, stored_with=row.incident_id)
            for row in sorted(rows, key=lambda row: row.id)
        ]

    def document(self, incident_id: str, number: int) -> bytes | None:
        """One document as JSON text; None if that incident has none of that number."""
        query = sa.select(EVIDENCE.c.document).where(EVIDENCE.c.incident_id == incident_id, EVIDENCE.c.id == number)
        found = self._database.rows(query)
        try:
            return unpack(found[0].document) if found else None
        except ValueError as error:
            raise self._database.unreadable(error) from error

    def forget(self, before: float) -> int:
        """Remove evidence older than this date; incidents, decisions and timelines stay. Returns how many pieces."""
        return self._database.change(sa.delete(EVIDENCE).where(EVIDENCE.c.at < before))


def pack(document: bytes) -> str:
    """The JSON `document` as the journal keeps it."""
    if len(document) < SMALL_BYTES:
        return document.decode()
    return MARK + base64.b64encode(zlib.compress(document, LEVEL)).decode()


def unpack(text: str) -> bytes:
    """The JSON document that `pack` was given. Raises ValueError for what is damaged."""
    if not text.startswith(MARK):
        return text.encode()
    try:
        packed = base64.b64decode(text[len(MARK) :], validate=True)
        unpacker = zlib.decompressobj()
        document = unpacker.decompress(packed, MAX_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"a packed document is damaged: {error}") from error
    if not unpacker.eof:
        raise ValueError("a packed document is cut short")
    return document
