"""What was seen, decided and done, in SQL: the truth after a crash.

A decision is written before it is carried out, each rung of it as an intent before and an outcome after; neither is
ever changed. Values lie as JSON documents beside the columns that are searched. Every method is one transaction, on disk
when it returns (SQLite: WAL with synchronous=FULL). One `Journal` belongs to one thread; every failure is a JournalError
that says what is wrong, where, and what to do. No file is ever deleted or overwritten by opening it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from watchdog.controller.packed import pack, unpack
from watchdog.model import (
    Action,
    ActionEnd,
    ActionRun,
    Decision,
    Incident,
    IncidentState,
    Rung,
    RungOutcome,
    RungRecord,
    Value,
    Verdict,
)

V = TypeVar("V", bound=Value)

SCHEMA_VERSION = 2
BUSY_MS = 5000

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
)
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
RUNGS = sa.Table(
    "rungs",
    META,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("decision_id", sa.String(64), nullable=False),
    sa.Column("rung", sa.String(32), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("intent_at", sa.Float, nullable=False),
    sa.Column("outcome", sa.String(16)),
    sa.Column("outcome_at", sa.Float),
    sa.Column("detail", sa.Text, nullable=False),
    sa.UniqueConstraint("decision_id", "rung", "attempt"),
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
"""Where what is said about an incident goes on. Releases that don't know the table leave it alone."""
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


def _to_2(sql: sa.Connection) -> None:
    """Threads of messages, and the ledger of nodes. A journal of schema 1 may have the former already."""
    for table in (THREADS, NODE_LEDGER):
        table.create(sql, checkfirst=True)


MIGRATIONS: dict[int, Callable[[sa.Connection], None]] = {1: _to_2}
"""From version n to n + 1, in the same transaction as the new version number."""


class JournalError(Exception):
    """A sentence: what is wrong with the journal, where it lies, what to do."""


class OutboxItem(Value, frozen=True, kw_only=True):
    """One message that waits to be sent."""

    id: int
    channel: str
    incident_id: str
    payload: dict[str, Any]
    added_at: float
    attempts: int
    """How often sending it has failed."""
    retry_at: float
    """Not to be tried before."""
    error: str


class NodeEntry(Value, frozen=True, kw_only=True):
    """One thing that we did to a node."""

    id: int
    node: str
    what: str
    """`excluded` (from `job_id`) or `drained`."""
    job_id: str
    decision_id: str
    at: float
    reason: str
    """Of a drain: as Slurm has it since."""
    reason_at: float | None
    """The time that Slurm gave to our drain: if it differs somebody else has drained the node since."""


class Journal:
    """The journal at `url`, a SQLAlchemy address (`sqlite:////var/lib/slurm-watchdog/journal.db`).

    Creates the tables in an empty database, migrates older schemas. Raises JournalError.
    """

    def __init__(self, url: str) -> None:
        try:
            self._url = sa.make_url(url)
        except sa.exc.ArgumentError as error:
            raise JournalError(
                "The journal's address is no SQLAlchemy URL; correct controller.journal_url."
            ) from error
        self._where = self._url.render_as_string(hide_password=True)
        self._together: sa.Connection | None = None
        try:
            self._engine = open_engine(self._url)
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            raise self._explain(error) from error
        try:
            with self._transaction() as sql:
                self._prepare(sql)
        except BaseException:
            self._engine.dispose()
            raise

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    @contextmanager
    def together(self) -> Iterator[None]:
        """All that is written in the block is committed at its end: one wait for the disk for hundreds of incidents of one moment.

        Not for decisions, which have to be on the disk before anything is done for them. Raises JournalError.
        """
        with self._transaction() as connection:
            self._together = connection
            try:
                yield
            finally:
                self._together = None

    # -- incidents

    def save_incident(self, incident: Incident) -> None:
        """Write an incident as it is now; the row of the same id is replaced."""
        row = {
            "state": incident.state.value,
            "kind": incident.kind.value,
            "opened_at": incident.opened_at,
            "document": encode(incident),
        }
        with self._transaction() as sql:
            done = sql.execute(sa.update(INCIDENTS).where(INCIDENTS.c.id == incident.id).values(row))
            if done.rowcount == 0:
                sql.execute(sa.insert(INCIDENTS).values(id=incident.id, **row))
            sql.execute(sa.delete(INCIDENT_JOBS).where(INCIDENT_JOBS.c.incident_id == incident.id))
            jobs = [
                {"incident_id": incident.id, "job_id": job_id} for job_id in dict.fromkeys(incident.job_ids)
            ]
            if jobs:
                sql.execute(sa.insert(INCIDENT_JOBS), jobs)

    def load_open_incidents(self) -> list[Incident]:
        """All that are not resolved, oldest first."""
        query = sa.select(INCIDENTS.c.document).where(INCIDENTS.c.state != IncidentState.RESOLVED.value)
        return self._documents(query.order_by(INCIDENTS.c.opened_at, INCIDENTS.c.id), Incident)

    def incidents(self, job_id: str | None = None, limit: int = 200) -> list[Incident]:
        """Incidents (of one job), newest first, at most `limit`."""
        query = sa.select(INCIDENTS.c.document)
        if job_id is not None:
            of_job = sa.select(INCIDENT_JOBS.c.incident_id).where(INCIDENT_JOBS.c.job_id == job_id)
            query = query.where(INCIDENTS.c.id.in_(of_job))
        query = query.order_by(INCIDENTS.c.opened_at.desc(), INCIDENTS.c.id.desc())
        return self._documents(query.limit(limit), Incident)

    def incident(self, incident_id: str) -> Incident | None:
        """One incident, None if there is none of that id."""
        found = self._documents(
            sa.select(INCIDENTS.c.document).where(INCIDENTS.c.id == incident_id), Incident
        )
        return found[0] if found else None

    def add_evidence(self, incident_id: str, at: float, kind: str, document: dict[str, Any]) -> None:
        """Keep a piece of evidence: `kind` says which, `document` is plain JSON."""
        self.add_packed_evidence(incident_id, at, kind, pack(msgspec.json.encode(document)))

    def add_packed_evidence(self, incident_id: str, at: float, kind: str, packed: str) -> None:
        """The same for a document that `packed.pack` has made ready, in another thread perhaps."""
        with self._transaction() as sql:
            sql.execute(
                sa.insert(EVIDENCE).values(incident_id=incident_id, at=at, kind=kind, document=packed)
            )

    def evidence(self, incident_id: str) -> list[tuple[float, str, dict[str, Any]]]:
        """(time, kind, document) of all evidence of an incident, in the order it was added."""
        query = sa.select(EVIDENCE).where(EVIDENCE.c.incident_id == incident_id).order_by(EVIDENCE.c.id)
        with self._transaction() as sql:
            return [(row.at, row.kind, self._unpacked(row.document)) for row in sql.execute(query)]

    def evidence_list(self, incident_id: str) -> list[tuple[int, float, str]]:
        """(number, time, kind) of the same, without the documents: those of a thousand ranks are tens of megabytes."""
        query = sa.select(EVIDENCE.c.id, EVIDENCE.c.at, EVIDENCE.c.kind).where(
            EVIDENCE.c.incident_id == incident_id
        )
        with self._transaction() as sql:
            return [(row.id, row.at, row.kind) for row in sql.execute(query.order_by(EVIDENCE.c.id))]

    def evidence_document(self, incident_id: str, number: int) -> bytes | None:
        """One document as JSON text; None if that incident has none of that number."""
        query = sa.select(EVIDENCE.c.document).where(
            EVIDENCE.c.incident_id == incident_id, EVIDENCE.c.id == number
        )
        with self._transaction() as sql:
            text = sql.execute(query).scalar_one_or_none()
        return None if text is None else self._raw(text)

    def forget_evidence(self, before: float) -> int:
        """Remove evidence that is older than this date; incidents, decisions and timelines stay. Returns how many pieces."""
        with self._transaction() as sql:
            return int(sql.execute(sa.delete(EVIDENCE).where(EVIDENCE.c.at < before)).rowcount)

    def note(self, incident_id: str, at: float, text: str) -> None:
        """Add a sentence to the timeline of an incident."""
        with self._transaction() as sql:
            sql.execute(sa.insert(TIMELINE).values(incident_id=incident_id, at=at, text=text))

    def timeline(self, incident_id: str) -> list[tuple[float, str]]:
        """(time, sentence) of an incident, in the order they were noted."""
        query = sa.select(TIMELINE.c.at, TIMELINE.c.text).where(TIMELINE.c.incident_id == incident_id)
        with self._transaction() as sql:
            return [(row.at, row.text) for row in sql.execute(query.order_by(TIMELINE.c.id))]

    # -- decisions and actions

    def add_decision(self, decision: Decision) -> None:
        """Write a decision, before anything is done for it. The same id twice is an error: decisions don't change."""
        row = {
            "id": decision.id,
            "incident_id": decision.incident_id,
            "verdict": decision.verdict.value,
            "action": decision.action.value,
            "decided_at": decision.decided_at,
            "document": encode(decision),
        }
        with self._transaction() as sql:
            if sql.execute(sa.select(DECISIONS.c.id).where(DECISIONS.c.id == decision.id)).first():
                raise JournalError(
                    f"Decision {decision.id} is already in the journal; decisions don't change."
                )
            sql.execute(sa.insert(DECISIONS).values(row))

    def decisions(self, incident_id: str | None = None) -> list[Decision]:
        """Decisions (of one incident), oldest first."""
        query = sa.select(DECISIONS.c.document)
        if incident_id is not None:
            query = query.where(DECISIONS.c.incident_id == incident_id)
        return self._documents(query.order_by(DECISIONS.c.decided_at, DECISIONS.c.id), Decision)

    def decisions_since(self, at: float) -> list[Decision]:
        """Actions allowed at `at` or later, oldest first: what budgets and cool-downs count."""
        query = sa.select(DECISIONS.c.document).where(DECISIONS.c.decided_at >= at, *TO_BE_DONE)
        return self._documents(query.order_by(DECISIONS.c.decided_at, DECISIONS.c.id), Decision)

    def rung_intent(self, decision_id: str, rung: Rung, attempt: int, at: float, detail: str = "") -> None:
        """Write that a rung is about to be tried. The same attempt twice is an error."""
        row = {
            "decision_id": decision_id,
            "rung": rung.value,
            "attempt": attempt,
            "intent_at": at,
            "detail": detail,
        }
        with self._transaction() as sql:
            self._require_open(sql, decision_id)
            if sql.execute(sa.select(RUNGS.c.id).where(*one_rung(decision_id, rung, attempt))).first():
                raise JournalError(
                    f"Attempt {attempt} of {rung} for decision {decision_id} is already in the journal."
                )
            sql.execute(sa.insert(RUNGS).values(row))

    def rung_outcome(
        self, decision_id: str, rung: Rung, attempt: int, outcome: RungOutcome, at: float, detail: str
    ) -> None:
        """Write what became of an intent, once. Raises JournalError if there is none or it has its outcome already.

        An empty `detail` leaves that of the intent.
        """
        row: dict[str, Any] = {"outcome": outcome.value, "outcome_at": at}
        if detail:
            row["detail"] = detail
        which = one_rung(decision_id, rung, attempt)
        with self._transaction() as sql:
            # The condition is part of the update, so that two writers can't both find it empty.
            if sql.execute(sa.update(RUNGS).where(*which, RUNGS.c.outcome.is_(None)).values(row)).rowcount:
                return
            found = sql.execute(sa.select(RUNGS.c.outcome).where(*which)).first()
        what = f"attempt {attempt} of {rung} for decision {decision_id}"
        if found is None:
            raise JournalError(f"There is no intent of {what}; an outcome without an intent is not written.")
        raise JournalError(
            f"The outcome of {what} is {found.outcome} already and stays so ({outcome} was refused)."
        )

    def end_action(self, decision_id: str, end: ActionEnd) -> None:
        """Write how the action of an allowed decision ended, once."""
        with self._transaction() as sql:
            self._require_open(sql, decision_id)
            sql.execute(sa.insert(ACTION_ENDS).values(decision_id=decision_id, document=encode(end)))

    def open_actions(self) -> list[ActionRun]:
        """Actions that were allowed and have not ended, oldest first, with what was done so far."""
        ended = sa.select(ACTION_ENDS.c.decision_id)
        return self._action_runs(*TO_BE_DONE, DECISIONS.c.id.not_in(ended))

    def actions(self, incident_id: str) -> list[ActionRun]:
        """Every action that was allowed for an incident, oldest first, with what was done and how it ended."""
        return self._action_runs(*TO_BE_DONE, DECISIONS.c.incident_id == incident_id)

    def _action_runs(self, *conditions: sa.ColumnElement[bool]) -> list[ActionRun]:
        query = (
            sa.select(DECISIONS.c.document)
            .where(*conditions)
            .order_by(DECISIONS.c.decided_at, DECISIONS.c.id)
        )
        with self._transaction() as sql:
            decisions = [self._decode(text, Decision) for text in sql.execute(query).scalars()]
            return [self._action_run(sql, decision) for decision in decisions]

    def _action_run(self, sql: sa.Connection, decision: Decision) -> ActionRun:
        rows = sql.execute(sa.select(RUNGS).where(RUNGS.c.decision_id == decision.id).order_by(RUNGS.c.id))
        records = tuple(
            RungRecord(
                rung=Rung(row.rung),
                attempt=row.attempt,
                intent_at=row.intent_at,
                outcome=None if row.outcome is None else RungOutcome(row.outcome),
                outcome_at=row.outcome_at,
                detail=row.detail,
            )
            for row in rows
        )
        query = sa.select(ACTION_ENDS.c.document).where(ACTION_ENDS.c.decision_id == decision.id)
        end = sql.execute(query).scalar_one_or_none()
        return ActionRun(
            decision=decision, records=records, end=None if end is None else self._decode(end, ActionEnd)
        )

    def _require_open(self, sql: sa.Connection, decision_id: str) -> None:
        """Raises JournalError unless the decision was allowed and its action has not ended."""
        query = sa.select(DECISIONS.c.verdict).where(DECISIONS.c.id == decision_id)
        verdict = sql.execute(query).scalar_one_or_none()
        if verdict != Verdict.ALLOWED.value:
            raise JournalError(
                f"Nothing may be done for decision {decision_id}: it is {verdict or 'not in the journal'}."
            )
        query = sa.select(ACTION_ENDS.c.decision_id).where(ACTION_ENDS.c.decision_id == decision_id)
        if sql.execute(query).first():
            raise JournalError(f"The action of decision {decision_id} has ended already.")

    # -- nodes

    def node_entry(
        self,
        node: str,
        what: str,
        decision: Decision,
        at: float,
        reason: str = "",
        reason_at: float | None = None,
    ) -> None:
        """Write down that a node is, or is about to be, excluded or drained. The same for the same decision twice is once."""
        row: dict[str, Any] = {"node": node, "what": what, "decision_id": decision.id}
        same = [NODE_LEDGER.c[name] == value for name, value in row.items()]
        job_id = decision.fence.job_id if decision.fence is not None else ""
        with self._transaction() as sql:
            if sql.execute(sa.select(NODE_LEDGER.c.id).where(*same)).first() is None:
                more = {"job_id": job_id, "at": at, "reason": reason, "reason_at": reason_at}
                sql.execute(sa.insert(NODE_LEDGER).values(row | more))

    def node_entries(self, what: str, job_id: str | None = None) -> list[NodeEntry]:
        """What we did to nodes and have not taken back, oldest first."""
        query = sa.select(NODE_LEDGER).where(NODE_LEDGER.c.what == what, NODE_LEDGER.c.ended_at.is_(None))
        if job_id is not None:
            query = query.where(NODE_LEDGER.c.job_id == job_id)
        with self._transaction() as sql:
            return [
                NodeEntry(
                    id=row.id,
                    node=row.node,
                    what=row.what,
                    job_id=row.job_id,
                    decision_id=row.decision_id,
                    at=row.at,
                    reason=row.reason,
                    reason_at=row.reason_at,
                )
                for row in sql.execute(query.order_by(NODE_LEDGER.c.id))
            ]

    def end_node_entry(self, entry_id: int, at: float, why: str) -> None:
        """It is taken back, or not ours any more."""
        ended = {"ended_at": at, "ended_why": why}
        with self._transaction() as sql:
            sql.execute(sa.update(NODE_LEDGER).where(NODE_LEDGER.c.id == entry_id).values(ended))

    # -- pause

    def pause(self, reason: str, by: str, at: float) -> None:
        """No action from now on, until resume. Paused already: the first reason stays."""
        with self._transaction() as sql:
            if sql.execute(sa.select(PAUSES.c.id).where(PAUSES.c.resumed_at.is_(None))).first() is None:
                sql.execute(sa.insert(PAUSES).values(reason=reason, paused_by=by, paused_at=at))

    def resume(self, by: str, at: float) -> None:
        """End the pause, if there is one."""
        ended = {"resumed_by": by, "resumed_at": at}
        with self._transaction() as sql:
            sql.execute(sa.update(PAUSES).where(PAUSES.c.resumed_at.is_(None)).values(ended))

    def paused(self) -> tuple[str, str, float] | None:
        """(reason, by whom, since when) while paused, else None."""
        query = sa.select(PAUSES).where(PAUSES.c.resumed_at.is_(None)).order_by(PAUSES.c.id)
        with self._transaction() as sql:
            row = sql.execute(query).first()
        return None if row is None else (row.reason, row.paused_by, row.paused_at)

    # -- outbox

    def outbox_add(self, channel: str, incident_id: str, payload: dict[str, Any], at: float) -> None:
        """Put a message up for sending; it stays until it is done, restarts included."""
        row = {"channel": channel, "incident_id": incident_id, "payload": encode(payload), "added_at": at}
        with self._transaction() as sql:
            sql.execute(sa.insert(OUTBOX).values(row))

    def outbox_pending(self, limit: int, channel: str | None = None, after: int = 0) -> list[OutboxItem]:
        """The oldest messages (of one channel) that are not done, in the order they were added; those with an id above `after`."""
        query = sa.select(OUTBOX).where(OUTBOX.c.done.is_(False), OUTBOX.c.id > after)
        if channel is not None:
            query = query.where(OUTBOX.c.channel == channel)
        query = query.order_by(OUTBOX.c.id).limit(limit)
        with self._transaction() as sql:
            return [
                OutboxItem(
                    id=row.id,
                    channel=row.channel,
                    incident_id=row.incident_id,
                    payload=self._decode(row.payload, dict[str, Any]),
                    added_at=row.added_at,
                    attempts=row.attempts,
                    retry_at=row.retry_at,
                    error=row.error,
                )
                for row in sql.execute(query)
            ]

    def outbox_done(self, item_id: int) -> None:
        """This message needs no more sending."""
        with self._transaction() as sql:
            sql.execute(sa.update(OUTBOX).where(OUTBOX.c.id == item_id).values(done=True))

    def outbox_done_all(self, channel: str, item_ids: Sequence[int]) -> None:
        """None of these needs more sending."""
        with self._transaction() as sql:
            for start in range(0, len(item_ids), 500):
                some = OUTBOX.c.id.in_(item_ids[start : start + 500])
                sql.execute(sa.update(OUTBOX).where(OUTBOX.c.channel == channel, some).values(done=True))

    def outbox_replace(
        self, channel: str, through: int, incident_id: str, payloads: Sequence[dict[str, Any]], at: float
    ) -> None:
        """Put `payloads` up in the place of every message of the channel with an id up to `through` that is not done."""
        new = [
            {"channel": channel, "incident_id": incident_id, "payload": encode(payload), "added_at": at}
            for payload in payloads
        ]
        old = (OUTBOX.c.channel == channel, OUTBOX.c.done.is_(False), OUTBOX.c.id <= through)
        with self._transaction() as sql:
            sql.execute(sa.update(OUTBOX).where(*old).values(done=True))
            if new:
                sql.execute(sa.insert(OUTBOX), new)

    def outbox_expire(self, channel: str, before: float) -> int:
        """Give up messages of a channel that were added before this date; returns how many."""
        old = (OUTBOX.c.channel == channel, OUTBOX.c.done.is_(False), OUTBOX.c.added_at < before)
        with self._transaction() as sql:
            return int(sql.execute(sa.update(OUTBOX).where(*old).values(done=True)).rowcount)

    def outbox_drop(self, channel: str, incident_id: str) -> None:
        """Give up what waits to be said about this."""
        old = (OUTBOX.c.channel == channel, OUTBOX.c.done.is_(False), OUTBOX.c.incident_id == incident_id)
        with self._transaction() as sql:
            sql.execute(sa.update(OUTBOX).where(*old).values(done=True))

    def outbox_forget(self, before: float) -> None:
        """Remove messages and threads from before this date, sent or not."""
        with self._transaction() as sql:
            sql.execute(sa.delete(OUTBOX).where(OUTBOX.c.added_at < before))
            sql.execute(sa.delete(THREADS).where(THREADS.c.at < before))

    def keep_thread(self, channel: str, incident_id: str, thread: str, at: float) -> None:
        """Remember where what is said about an incident goes on."""
        key = {"channel": channel, "incident_id": incident_id}
        with self._transaction() as sql:
            sql.execute(sa.delete(THREADS).where(*(THREADS.c[name] == value for name, value in key.items())))
            sql.execute(sa.insert(THREADS).values(**key, thread=thread, at=at))

    def thread_of(self, channel: str, incident_id: str) -> str | None:
        """The thread of an incident in a channel, None if it has none."""
        query = sa.select(THREADS.c.thread).where(
            THREADS.c.channel == channel, THREADS.c.incident_id == incident_id
        )
        with self._transaction() as sql:
            return sql.execute(query).scalar_one_or_none()

    def outbox_failed(self, item_id: int, error: str, retry_at: float) -> None:
        """Sending failed; not to be tried again before `retry_at`."""
        failed = {"error": error, "retry_at": retry_at, "attempts": OUTBOX.c.attempts + 1}
        with self._transaction() as sql:
            sql.execute(sa.update(OUTBOX).where(OUTBOX.c.id == item_id).values(failed))

    # -- inside

    def _prepare(self, sql: sa.Connection) -> None:
        """Make the tables, or bring them to this version; refuses those of a newer one."""
        tables = set(sa.inspect(sql).get_table_names())
        if SCHEMA.name not in tables:
            strangers = tables & set(META.tables)
            if strangers:
                raise JournalError(
                    f"The database {self._where} has tables of other software ({', '.join(sorted(strangers))}); "
                    "give the journal one of its own in controller.journal_url."
                )
            META.create_all(sql)
            sql.execute(sa.insert(SCHEMA).values(version=SCHEMA_VERSION))
            return
        version = sql.execute(sa.select(SCHEMA.c.version)).scalar_one()
        while version < SCHEMA_VERSION and version in MIGRATIONS:
            MIGRATIONS[version](sql)
            version += 1
            sql.execute(sa.update(SCHEMA).values(version=version))
        if version != SCHEMA_VERSION:
            raise JournalError(
                f"The journal {self._where} has schema version {version}, this program knows {SCHEMA_VERSION}; "
                "install the release that wrote it, or move the journal away to begin a new one."
            )

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        """One transaction: committed at the end, rolled back by any exception; database errors become JournalError."""
        try:
            if self._together is not None:
                with self._together.begin_nested():
                    yield self._together
                return
            with self._engine.begin() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise self._explain(error) from error

    def _documents(self, query: sa.Select[Any], kind: type[V]) -> list[V]:
        with self._transaction() as sql:
            return [self._decode(text, kind) for text in sql.execute(query).scalars()]

    def _decode(self, text: str, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise JournalError(
                f"A record in the journal {self._where} can't be read ({error}); restore it from a backup, or move it away."
            ) from error

    def _unpacked(self, text: str) -> dict[str, Any]:
        document: dict[str, Any] = self._decode(self._raw(text).decode(errors="replace"), dict[str, Any])
        return document

    def _raw(self, text: str) -> bytes:
        try:
            return unpack(text)
        except ValueError as error:
            raise JournalError(
                f"A record in the journal {self._where} can't be read ({error}); restore it from a backup, or move it away."
            ) from error

    def _explain(self, error: Exception) -> JournalError:
        text = str(getattr(error, "orig", None) or error).splitlines()[0][:300]
        for sign, advice in ADVICE:
            if sign in text:
                return JournalError(f"The journal {self._where} {advice} ({text}).")
        return JournalError(
            f"The journal {self._where} failed: {text}. Nothing is done until it works again."
        )


ADVICE = (
    (
        "not a database",
        "is no SQLite database or damaged; move it away or restore a backup, then start again",
    ),
    ("malformed", "is damaged; keep a copy, restore a backup or move it away, then start again"),
    ("disk is full", "has no room: its disk is full; free some, nothing is done until then"),
    ("readonly", "is read-only; check the mount and the owner of the file and its directory"),
    ("unable to open", "can't be opened; its directory must exist and be writable for the controller"),
    ("disk I/O error", "can't be read or written: its disk reports errors; check it before anything else"),
    ("locked", "is in use by another process; only one controller may run"),
)
"""What SQLite says, and what it means for whoever reads it."""


def one_rung(decision_id: str, rung: Rung, attempt: int) -> tuple[sa.ColumnElement[bool], ...]:
    """The conditions that find one attempt of one rung."""
    return (RUNGS.c.decision_id == decision_id, RUNGS.c.rung == rung.value, RUNGS.c.attempt == attempt)


def encode(value: Any) -> str:
    """The JSON document of a value. Raises what msgspec raises for a value that is none."""
    return msgspec.json.encode(value).decode()


def open_engine(url: sa.URL) -> sa.Engine:
    """An engine for one thread. For SQLite: durable, waiting for locks, transactions that begin where we say."""
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(url, pool_pre_ping=True)
    engine = sa.create_engine(url, poolclass=sa.pool.StaticPool)

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, record: Any) -> None:
        # The driver would begin transactions by itself, and not before reads; we do it below.
        connection.isolation_level = None
        for pragma in (f"busy_timeout={BUSY_MS}", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}").close()

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        # IMMEDIATE: a transaction that only later turned to writing could fail halfway with "locked".
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
