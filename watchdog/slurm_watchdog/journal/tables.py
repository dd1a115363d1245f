"""The journal's tables, and how those of older releases become them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import sqlalchemy as sa

from slurm_watchdog.journal.error import JournalError, NewerRelease
from slurm_watchdog.model.actions import Action, Verdict

SCHEMA_VERSION = 14
META = sa.MetaData()
SCHEMA = sa.Table("journal_schema", META, sa.Column("version", sa.Integer, nullable=False))
INCIDENTS = sa.Table(
    "incidents",
    META,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("opened_at", sa.Float, nullable=False, index=True),
    sa.Column("document", sa.Text, nullable=False),
)
INCIDENT_JOBS = sa.Table(
    "incident_jobs",
    META,
    sa.Column("incident_id", sa.String(64), primary_key=True),
    sa.Column("job_id", sa.String(64), primary_key=True, index=True),
)
EVIDENCE = sa.Table(
    "evidence",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("incident_id", sa.String(64), nullable=False, index=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("collection", sa.String(32)),
)
"""`collection`: the one that this piece came from; NULL for what the controller itself knew, and of schemas
before 3."""
EVIDENCE_SHARED = sa.Table(
    "evidence_shared",
    META,
    sa.Column("incident_id", sa.String(64), primary_key=True),
    sa.Column("collection", sa.String(32), primary_key=True),
    sa.Column("stored_with", sa.String(64), nullable=False),
)
"""Incidents that a collection counts for although its pieces are stored with another one."""
DECISIONS = sa.Table(
    "decisions",
    META,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("incident_id", sa.String(64), nullable=False, index=True),
    sa.Column("verdict", sa.String(16), nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("decided_at", sa.Float, nullable=False, index=True),
    sa.Column("document", sa.Text, nullable=False),
)
TO_BE_DONE = (DECISIONS.c.verdict == Verdict.ALLOWED.value, DECISIONS.c.action != Action.NONE.value)
"""Decisions that something is done for: allowed, and not to do nothing."""
OPERATIONS = sa.Table(
    "operations",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("decision_id", sa.String(64), nullable=False),
    sa.Column("operation", sa.String(32), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("intent_at", sa.Float, nullable=False),
    sa.Column("outcome", sa.String(16)),
    sa.Column("outcome_at", sa.Float),
    sa.Column("detail", sa.Text, nullable=False),
    sa.UniqueConstraint("decision_id", "operation", "attempt"),
)
ACTION_ENDS = sa.Table(
    "action_ends",
    META,
    sa.Column("decision_id", sa.String(64), primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)
PAUSES = sa.Table(
    "pauses",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("paused_by", sa.String(255), nullable=False),
    sa.Column("paused_at", sa.Float, nullable=False),
    sa.Column("resumed_by", sa.String(255)),
    sa.Column("resumed_at", sa.Float),
)
TIMELINE = sa.Table(
    "timeline",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("incident_id", sa.String(64), nullable=False, index=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)
OUTBOX = sa.Table(
    "outbox",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("channel", sa.String(32), nullable=False),
    sa.Column("incident_id", sa.String(64), nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("added_at", sa.Float, nullable=False),
    sa.Column("done", sa.Boolean, nullable=False, default=False, index=True),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("retry_at", sa.Float, nullable=False, default=0.0),
    sa.Column("error", sa.Text, nullable=False, default=""),
)
THREADS = sa.Table(
    "message_threads",
    META,
    sa.Column("channel", sa.String(32), primary_key=True),
    sa.Column("incident_id", sa.String(64), primary_key=True),
    sa.Column("thread", sa.String(128), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)
"""The thread in which messages about an incident continue. Releases that don't know the table leave it alone."""
NODE_LEDGER = sa.Table(
    "node_ledger",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("node", sa.String(255), nullable=False, index=True),
    sa.Column("what", sa.String(16), nullable=False),
    sa.Column("job_id", sa.String(64), nullable=False, index=True),
    sa.Column("decision_id", sa.String(64), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("reason_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("ended_why", sa.Text),
)
"""What we did to nodes, one row each: an exclusion from a job, a drain; and when it was taken back."""
NODE_EVENTS = sa.Table(
    "node_events",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.String(512), nullable=False, unique=True),
    sa.Column("node", sa.String(255), nullable=False, index=True),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("at", sa.Float, nullable=False, index=True),
    sa.Column("what", sa.Text, nullable=False),
    sa.Column("place", sa.String(255), nullable=False, index=True),
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("chain", sa.String(512), nullable=False),
    sa.Column("incident_id", sa.String(64), nullable=False),
    sa.Column("withdrawn_at", sa.Float),
    sa.Column("withdrawn_why", sa.Text, nullable=False),
)
"""What happened to nodes and their parts, one row each: see slurm_watchdog.model.node_events. What an event weighs is
computed, and in no column."""

HANG_PLACES = sa.Table(
    "hang_places",
    META,
    sa.Column("incident_id", sa.String(64), primary_key=True),
    sa.Column("at", sa.Float, nullable=False, index=True),
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("chain", sa.String(512), nullable=False),
    sa.Column("fingerprint", sa.String(32), nullable=False),
    sa.Column("where", sa.Text, nullable=False),
    sa.Column("node", sa.String(255), nullable=False),
    sa.Column("rank", sa.Integer),
    sa.Column("step", sa.BigInteger),
)
"""Where jobs hung, one row an incident: see slurm_watchdog.model.hang_place."""

QUARANTINES = sa.Table(
    "quarantines",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("node", sa.String(255), nullable=False, index=True),
    sa.Column("incident_id", sa.String(64), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason_at", sa.Float),
    sa.Column("ended_at", sa.Float, index=True),
    sa.Column("ended_why", sa.Text, nullable=False),
    sa.Column("reservation", sa.String(350)),
)
"""Nodes that we took, or are about to take, out of service: see slurm_watchdog.model.node_events."""

SILENCES = sa.Table(
    "silences",
    META,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("ended_at", sa.Float, index=True),
    sa.Column("ended_why", sa.Text, nullable=False),
)
"""What people are not notified of, one row a silence: see slurm_watchdog.model.silence."""

JOB_RUNS = sa.Table(
    "job_runs",
    META,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("restarts", sa.Integer, primary_key=True),
    sa.Column("began_at", sa.Float, nullable=False, index=True),
    sa.Column("seen_at", sa.Float, nullable=False, index=True),
    sa.Column("document", sa.Text, nullable=False),
)
"""Runs of jobs, for reports: see slurm_watchdog.model.run_record."""


def _to_2(sql: sa.Connection) -> None:
    """Threads of messages, and the ledger of nodes. A journal of schema 1 may have the former already."""
    for table in (THREADS, NODE_LEDGER):
        table.create(sql, checkfirst=True)


def _to_3(sql: sa.Connection) -> None:
    """Which collection a piece of evidence came from, and which incidents share one."""
    EVIDENCE_SHARED.create(sql, checkfirst=True)
    if all(column["name"] != "collection" for column in sa.inspect(sql).get_columns("evidence")):
        sql.execute(sa.text("ALTER TABLE evidence ADD COLUMN collection VARCHAR(32)"))


def _to_4(sql: sa.Connection) -> None:
    """Operations, which were called rungs before: a rung is a word of a ladder, an operation what is done for it."""
    sql.execute(sa.text("ALTER TABLE rungs RENAME TO operations"))
    sql.execute(sa.text("ALTER TABLE operations RENAME COLUMN rung TO operation"))


def _to_5(sql: sa.Connection) -> None:
    """Events of nodes."""
    NODE_EVENTS.create(sql, checkfirst=True)


def _to_6(sql: sa.Connection) -> None:
    """Places of hangs."""
    HANG_PLACES.create(sql, checkfirst=True)


def _to_7(sql: sa.Connection) -> None:
    """Quarantines."""
    QUARANTINES.create(sql, checkfirst=True)


def _to_8(sql: sa.Connection) -> None:
    """Silences."""
    SILENCES.create(sql, checkfirst=True)


def _to_9(sql: sa.Connection) -> None:
    """Searches for slow nodes, which left with schema 14."""


def _to_10(sql: sa.Connection) -> None:
    """Runs of jobs."""
    JOB_RUNS.create(sql, checkfirst=True)


def _to_11(sql: sa.Connection) -> None:
    """Suspect nodes that are kept in a reservation."""
    if all(column["name"] != "reservation" for column in sa.inspect(sql).get_columns("quarantines")):
        sql.execute(sa.text("ALTER TABLE quarantines ADD COLUMN reservation VARCHAR(350)"))


def _to_12(sql: sa.Connection) -> None:
    """Nothing: it was for drains that people asked for, which left with schema 14."""


def _to_13(sql: sa.Connection) -> None:
    """Tests of nodes, which left with schema 14."""


GONE: Final[tuple[str, ...]] = ("node_tests", "slow_searches")
"""Tables of features that left the product with schema 14."""


def _to_14(sql: sa.Connection) -> None:
    """Without the tables of features that left the product; what a person has acknowledged, or had drained, is over:
    that person gives such a node back."""
    # A row of an acknowledgement has no end. In a text of JSON this key's quotes would be escaped.
    over = SILENCES.c.ended_at.is_(None), ~SILENCES.c.document.contains('"until":', autoescape=True)
    sql.execute(sa.update(SILENCES).where(*over).values(ended_at=0.0, ended_why="acknowledgements were removed"))
    if any(column["name"] == "asked_by" for column in sa.inspect(sql).get_columns("quarantines")):
        left = "SET state = 'left', ended_at = at, ended_why = 'drains for people were removed'"
        sql.execute(sa.text(f"UPDATE quarantines {left} WHERE asked_by <> '' AND ended_at IS NULL"))
    for name in GONE:
        sql.execute(sa.text(f"DROP TABLE IF EXISTS {name}"))


Migrations = Mapping[int, Callable[[sa.Connection], None]]
MIGRATIONS: Final[Migrations] = {
    1: _to_2, 2: _to_3, 3: _to_4, 4: _to_5, 5: _to_6, 6: _to_7, 7: _to_8, 8: _to_9, 9: _to_10, 10: _to_11,
    11: _to_12, 12: _to_13, 13: _to_14,
}  # fmt: skip
"""From version n to n + 1, in the same transaction as the new version number."""


def refuse_newer(sql: sa.Connection, where: str, newest: int = SCHEMA_VERSION) -> None:
    """Raises NewerRelease if the tables are of a later version than `newest`. Nothing is changed."""
    if not sa.inspect(sql).has_table(SCHEMA.name):
        return
    version = sql.execute(sa.select(SCHEMA.c.version)).scalar_one()
    if version > newest:
        raise NewerRelease(_not_ours(where, version, newest))


def _not_ours(where: str, version: int, newest: int) -> str:
    return (
        f"The journal {where} has schema version {version}, this program knows {newest}; "
        "install the release that wrote it, or move the journal away to begin a new one."
    )


def prepare(sql: sa.Connection, where: str, newest: int = SCHEMA_VERSION, migrations: Migrations = MIGRATIONS) -> None:
    """Make the tables in the database at `where`, or bring them to the version `newest`. Raises JournalError for
    those of a newer one."""
    tables = set(sa.inspect(sql).get_table_names())
    if SCHEMA.name not in tables:
        strangers = tables & set(META.tables)
        if strangers:
            raise JournalError(
                f"The database {where} has tables of other software ({', '.join(sorted(strangers))}); "
                "give the journal one of its own in controller.journal_url."
            )
        META.create_all(sql)
        sql.execute(sa.insert(SCHEMA).values(version=newest))
        return
    version = sql.execute(sa.select(SCHEMA.c.version)).scalar_one()
    while version < newest and version in migrations:
        migrations[version](sql)
        version += 1
        sql.execute(sa.update(SCHEMA).values(version=version))
    if version != newest:
        raise JournalError(_not_ours(where, version, newest))
