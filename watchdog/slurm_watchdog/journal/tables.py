"""The journal's tables, and how those of older releases become them."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from slurm_watchdog.journal.error import JournalError, NewerRelease
from slurm_watchdog.model.actions import Action, Verdict

SCHEMA_VERSION = 14
META = sa.MetaData()
TYPES: Final[dict[str, type[sa.types.TypeEngine[Any]]]] = {
    "int": sa.Integer, "bigint": sa.BigInteger, "float": sa.Float, "text": sa.Text, "bool": sa.Boolean,
}  # fmt: skip


def _table(name: str, columns: str, *more: sa.UniqueConstraint) -> sa.Table:
    """A column is `NAME TYPE`, in which a number means so many letters, and `key`, `index`, `unique` or `null`."""
    made = []
    for column in columns.split(", "):
        called, letters, *marks = column.split()
        kind = sa.String(int(letters)) if letters.isdecimal() else TYPES[letters]()
        index, unique = ("index" in marks or None), ("unique" in marks or None)
        key, null = "key" in marks, "null" in marks
        made.append(sa.Column(called, kind, primary_key=key, nullable=null, index=index, unique=unique))
    return sa.Table(name, META, *made, *more)


SCHEMA = _table("journal_schema", "version int")
INCIDENTS = _table("incidents", "id 64 key, state 16 index, kind 64, opened_at float index, document text")
INCIDENT_JOBS = _table("incident_jobs", "incident_id 64 key, job_id 64 key index")
EVIDENCE = _table("evidence", "id int key, incident_id 64 index, at float, kind 64, document text, collection 32 null")
"""`collection`: the one that it came from; NULL for what the controller itself knew, and of schemas before 3."""
EVIDENCE_SHARED = _table("evidence_shared", "incident_id 64 key, collection 32 key, stored_with 64")
"""Incidents that a collection counts for although its pieces are stored with another one."""
DECISIONS = _table(
    "decisions",
    "id 64 key, incident_id 64 index, verdict 16, action 32, decided_at float index, document text",
)
TO_BE_DONE = (DECISIONS.c.verdict == Verdict.ALLOWED.value, DECISIONS.c.action != Action.NONE.value)
"""Decisions that something is done for: allowed, and not to do nothing."""
OPERATIONS = _table(
    "operations",
    "id int key, decision_id 64, operation 32, attempt int, intent_at float, outcome 16 null, outcome_at float null, "
    "detail text",
    sa.UniqueConstraint("decision_id", "operation", "attempt"),
)
ACTION_ENDS = _table("action_ends", "decision_id 64 key, document text")
PAUSES = _table(
    "pauses",
    "id int key, reason text, paused_by 255, paused_at float, resumed_by 255 null, resumed_at float null",
)
TIMELINE = _table("timeline", "id int key, incident_id 64 index, at float, text text")
OUTBOX = _table(
    "outbox",
    "id int key, channel 32, incident_id 64, payload text, added_at float, done bool index, attempts int, "
    "retry_at float, error text",
)
THREADS = _table("message_threads", "channel 32 key, incident_id 64 key, thread 128, at float")
"""The thread in which messages about an incident continue."""
NODE_LEDGER = _table(
    "node_ledger",
    "id int key, node 255 index, what 16, job_id 64 index, decision_id 64, at float, reason text, "
    "reason_at float null, ended_at float null, ended_why text null",
)  # What we did to nodes, one row each: an exclusion from a job, a drain; and when it was taken back.
NODE_EVENTS = _table(
    "node_events",
    "id int key, key 512 unique, node 255 index, kind 64, at float index, what text, place 255 index, job_id 64, "
    "chain 512, incident_id 64, withdrawn_at float null, withdrawn_why text",
)  # What happened to nodes and their parts. What an event weighs is computed, and in no column.
HANG_PLACES = _table(
    "hang_places",
    "incident_id 64 key, at float index, job_id 64, chain 512, fingerprint 32, where text, node 255, rank int null, "
    "step bigint null",
)
SILENCES = _table("silences", "number int key, id 64 unique, document text, ended_at float index null, ended_why text")
JOB_RUNS = _table(
    "job_runs", "job_id 64 key, restarts int key, began_at float index, seen_at float index, document text"
)  # Runs of jobs, for reports.

MIGRATIONS = (
    (range(1, 3), "ALTER TABLE evidence ADD COLUMN collection VARCHAR(32)"),
    (range(1, 4), "ALTER TABLE rungs RENAME TO operations"),
    (range(1, 4), "ALTER TABLE operations RENAME COLUMN rung TO operation"),
    # Acknowledgements left with schema 14. Their rows have no end; in a text of JSON this key's quotes are escaped.
    (range(8, 14), "UPDATE silences SET ended_at = 0.0, ended_why = 'acknowledgements were removed' "
     """WHERE ended_at IS NULL AND document NOT LIKE '%"until":%'"""),
    (range(7, 14), "DROP TABLE IF EXISTS quarantines"),
    (range(9, 14), "DROP TABLE IF EXISTS slow_searches"),
    (range(13, 14), "DROP TABLE IF EXISTS node_tests"),
)  # fmt: skip
"""What journals of these schemas need to become one of SCHEMA_VERSION, in this order, before tables are made."""


def refuse_newer(sql: sa.Connection, where: str) -> int:
    """The schema version of the tables; 0: there are none. Raises NewerRelease for one that this release does not know.
    Nothing is changed."""
    if not sa.inspect(sql).has_table(SCHEMA.name):
        return 0
    version = int(sql.execute(sa.select(SCHEMA.c.version)).scalar_one())
    if version > SCHEMA_VERSION:
        raise NewerRelease(
            f"The journal {where} has schema version {version}, this program knows {SCHEMA_VERSION}; "
            "install the release that wrote it, or move the journal away to begin a new one."
        )
    return version


def prepare(sql: sa.Connection, where: str) -> None:
    """Make the tables in the database at `where`, or bring them to SCHEMA_VERSION, in the same transaction as the new
    version number. Raises JournalError for those of a newer one."""
    version = refuse_newer(sql, where)
    if version == SCHEMA_VERSION:
        return
    strangers = set() if version else set(sa.inspect(sql).get_table_names()) & set(META.tables)
    if strangers:
        raise JournalError(
            f"The database {where} has tables of other software ({', '.join(sorted(strangers))}); "
            "give the journal its own database in controller.journal_url."
        )
    for schemas, statement in MIGRATIONS:
        if version in schemas:
            sql.execute(sa.text(statement))
    META.create_all(sql)
    number = {"version": SCHEMA_VERSION}
    sql.execute(sa.update(SCHEMA).values(number) if version else sa.insert(SCHEMA).values(number))
