"""What was seen, decided and done, in SQL: the truth after a crash.

A decision is written before it is carried out, each operation of it as an intent before and an outcome after;
neither is ever changed. Values lie as JSON documents beside the columns that are searched. Every method is
one transaction, on disk when it returns (SQLite: WAL with synchronous=FULL). One `Journal` belongs to one
thread; every failure is a JournalError that says what is wrong, where, and what to do. No file is ever
deleted or overwritten by opening it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa
from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.journal.database import Database, Documents, JournalError, encode, plain, value_of
from slurm_watchdog.journal.evidence import SqlEvidence
from slurm_watchdog.journal.outbox import SqlOutbox
from slurm_watchdog.journal.tables import (
    ACTION_ENDS,
    DECISIONS,
    HANG_PLACES,
    INCIDENT_JOBS,
    INCIDENTS,
    JOB_RUNS,
    NODE_EVENTS,
    NODE_LEDGER,
    OPERATIONS,
    PAUSES,
    SILENCES,
    TIMELINE,
    TO_BE_DONE,
    prepare,
)
from slurm_watchdog.model.actions import (
    ActionEnd,
    ActionRun,
    Decision,
    Operation,
    OperationOutcome,
    OperationRecord,
    Verdict,
)
from slurm_watchdog.model.incidents import HangPlace, Incident, IncidentState, Silence
from slurm_watchdog.model.node_events import NodeEvent
from slurm_watchdog.model.run_record import RunRecord

__all__ = ["Journal", "JournalError", "NodeEntry"]

IDS_AT_ONCE = 500  # In one query: databases limit how many values a statement takes.
OWNERS_AMONG = 2000  # The newest incidents, among which those of one owner are looked for in documents.
DROP_INCIDENT_JOBS = sa.delete(INCIDENT_JOBS).where(INCIDENT_JOBS.c.incident_id == sa.bindparam("saved"))
ADD_INCIDENT_JOB = sa.insert(INCIDENT_JOBS)
ADD_NOTE = sa.insert(TIMELINE)


class NodeEntry(Struct):
    """One thing that we did to a node."""

    id: int | None = None
    node: str
    what: str  # `excluded` (from `job_id`) or `drained`.
    job_id: str
    decision_id: str
    at: float
    reason: str  # Of a drain: as Slurm has it since.
    reason_at: float | None = None  # Slurm's time of our drain: if it differs someone else has drained it since.
    ended_at: float | None = None
    ended_why: str | None = None


class Journal:
    """The journal at `url`, a SQLAlchemy address (`sqlite:////var/lib/slurm-watchdog/journal.db`).

    Creates the tables in an empty database, migrates older schemas. Raises JournalError.
    """

    def __init__(self, url: str, database: Callable[[str], Database] = Database) -> None:
        self.url = url
        self._database = database(url)
        self.outbox = SqlOutbox(self._database)
        self.evidence = SqlEvidence(self._database)
        self.hang_places = Documents(self._database, HANG_PLACES, HangPlace, "incident_id")
        self.run_records = Documents(self._database, JOB_RUNS, RunRecord, "job_id", "restarts", order="began_at job_id")
        self.node_events = Documents(self._database, NODE_EVENTS, NodeEvent, "key", order="at id")
        self.silences = Documents(self._database, SILENCES, Silence, "id", order="number")
        self._incidents = Documents(self._database, INCIDENTS, Incident, "id", order="opened_at id")
        self._decisions = Documents(self._database, DECISIONS, Decision, "id", order="decided_at id")
        self._entries = Documents(self._database, NODE_LEDGER, NodeEntry, "id", order="id")
        try:
            with self._database.transaction() as sql:
                prepare(sql, self._database.where)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def together(self) -> AbstractContextManager[None]:
        """All that is written in the block, messages too, is committed at its end, or nothing of it: one wait
        for the disk for thousands of incidents of one moment.

        Not for decisions, which have to be on the disk before anything is done for them. Raises JournalError.
        """
        return self._database.together()

    # -- incidents

    def save_incident(self, incident: Incident) -> None:
        """Write an incident as it is now; the row of the same id is replaced."""
        jobs = [
            {"incident_id": incident.id, "job_id": job_id} for job_id in dict.fromkeys(map(plain, incident.job_ids))
        ]
        self._database.put(
            *self._incidents.writes(incident),
            (DROP_INCIDENT_JOBS, [{"saved": incident.id}]),
            (ADD_INCIDENT_JOB, jobs),
            key=incident.id,
        )

    def load_open_incidents(self) -> list[Incident]:
        """All that are not resolved, oldest first."""
        return self._incidents.find(INCIDENTS.c.state != IncidentState.RESOLVED.value)

    def incidents(
        self, job_id: str | None = None, limit: int = 200, *, owner: int | None = None, beginning: str = ""
    ) -> list[Incident]:
        """Incidents (of one job; of jobs of this `owner` alone, among the newest OWNERS_AMONG of all; with ids that
        begin so), newest first, at most `limit`."""
        where: list[sa.ColumnElement[bool]] = []
        if beginning:
            where.append(INCIDENTS.c.id.startswith(beginning, autoescape=True))
        if owner is not None:  # as a document has it; a text in one has its quotes escaped
            newest = sa.select(INCIDENTS.c.opened_at).order_by(INCIDENTS.c.opened_at.desc()).offset(OWNERS_AMONG - 1)
            where.append(INCIDENTS.c.opened_at >= sa.func.coalesce(newest.limit(1).scalar_subquery(), 0.0))
            where.append(INCIDENTS.c.document.contains(f'"owners":[{owner}]', autoescape=True))
        if job_id is not None:
            of_job = sa.select(INCIDENT_JOBS.c.incident_id).where(INCIDENT_JOBS.c.job_id == job_id)
            where.append(INCIDENTS.c.id.in_(of_job))
        return self._incidents.find(*where, newest=limit)

    def incident(self, incident_id: str) -> Incident | None:
        """One incident, None if there is none of that id."""
        return next(iter(self._incidents.of(id=[incident_id])), None)

    def add_note(self, incident_id: str, at: float, text: str) -> None:
        """Add a sentence to the timeline of an incident."""
        self._database.put((ADD_NOTE, [{"incident_id": incident_id, "at": at, "text": plain(text)}]))

    def timeline(self, incident_id: str) -> list[tuple[float, str]]:
        """(time, sentence) of an incident, in the order they were noted."""
        query = sa.select(TIMELINE.c.at, TIMELINE.c.text).where(TIMELINE.c.incident_id == incident_id)
        return [(row.at, row.text) for row in self._database.rows(query.order_by(TIMELINE.c.id))]

    # -- decisions and actions

    def add_decision(self, decision: Decision) -> None:
        """Write a decision, before anything is done for it. The same id twice is an error: decisions don't change."""
        self._decisions.add(decision)

    def decisions(self, incident_id: str | None = None) -> list[Decision]:
        """Decisions (of one incident), oldest first."""
        return self._decisions.find() if incident_id is None else self._decisions.of(incident_id=[incident_id])

    def decisions_about(self, incident_ids: Iterable[str]) -> dict[str, list[Decision]]:
        """Incident -> its decisions, oldest first, of many incidents at once."""
        found: dict[str, list[Decision]] = {incident_id: [] for incident_id in incident_ids}
        ids = list(found)
        for start in range(0, len(ids), IDS_AT_ONCE):
            for decision in self._decisions.of(incident_id=ids[start : start + IDS_AT_ONCE]):
                found[decision.incident_id].append(decision)
        return found

    def decisions_since(self, at: float) -> list[Decision]:
        """Actions allowed at `at` or later, oldest first: what budgets and cool-downs count."""
        return self._decisions.find(DECISIONS.c.decided_at >= at, *TO_BE_DONE)

    def operation_intent(
        self, decision_id: str, operation: Operation, attempt: int, at: float, detail: str = ""
    ) -> None:
        """Write that an operation is about to be tried. The same attempt twice is an error."""
        row = {
            "decision_id": decision_id,
            "operation": operation.value,
            "attempt": attempt,
            "intent_at": at,
            "detail": plain(detail),
        }
        with self._database.transaction() as sql:
            self._require_open(sql, decision_id)
            if sql.execute(sa.select(OPERATIONS.c.id).where(*one_operation(decision_id, operation, attempt))).first():
                raise JournalError(
                    f"Attempt {attempt} of {operation} for decision {decision_id} is already in the journal."
                )
            sql.execute(sa.insert(OPERATIONS).values(row))

    def operation_outcome(
        self,
        decision_id: str,
        operation: Operation,
        attempt: int,
        outcome: OperationOutcome,
        at: float,
        detail: str,
    ) -> None:
        """Write what became of an intent, once. Raises JournalError if there is none or it has its outcome already.

        An empty `detail` leaves that of the intent.
        """
        row: dict[str, Any] = {"outcome": outcome.value, "outcome_at": at}
        if detail:
            row["detail"] = plain(detail)
        which = one_operation(decision_id, operation, attempt)
        with self._database.transaction() as sql:
            # The condition is part of the update, so that two writers can't both find it empty.
            if sql.execute(sa.update(OPERATIONS).where(*which, OPERATIONS.c.outcome.is_(None)).values(row)).rowcount:
                return
            found = sql.execute(sa.select(OPERATIONS.c.outcome).where(*which)).first()
        what = f"attempt {attempt} of {operation} for decision {decision_id}"
        if found is None:
            raise JournalError(f"No intent of {what}; an outcome without an intent is not written.")
        raise JournalError(f"The outcome of {what} is {found.outcome} already and stays so ({outcome} was refused).")

    def end_action(self, decision_id: str, end: ActionEnd) -> None:
        """Write how the action of an allowed decision ended, once."""
        with self._database.transaction() as sql:
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
        about = sa.select(DECISIONS.c.id).where(*conditions)
        done = sa.select(OPERATIONS).where(OPERATIONS.c.decision_id.in_(about)).order_by(OPERATIONS.c.id)
        ended = sa.select(ACTION_ENDS).where(ACTION_ENDS.c.decision_id.in_(about))
        decisions = self._decisions.find(*conditions)
        records: dict[str, list[OperationRecord]] = defaultdict(list)
        for row in self._database.rows(done):
            records[row.decision_id].append(value_of(row, OperationRecord))
        ends = {row.decision_id: self._database.decode(row.document, ActionEnd) for row in self._database.rows(ended)}
        return [ActionRun(decision=each, records=tuple(records[each.id]), end=ends.get(each.id)) for each in decisions]

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
        """Write down that a node is, or is about to be, excluded or drained: once for one decision."""
        job_id = decision.fence.job_id if decision.fence is not None else ""
        c = self._entries.c
        if not self._entries.find(c.node == node, c.what == what, c.decision_id == decision.id):
            entry = NodeEntry(
                node=node, what=what, job_id=job_id, decision_id=decision.id, at=at, reason=reason, reason_at=reason_at
            )  # fmt: skip
            self._entries.add(entry)

    def node_entries(self, what: str, job_id: str | None = None) -> list[NodeEntry]:
        """What we did to nodes and have not taken back, oldest first."""
        c = self._entries.c
        return self._entries.find(
            c.what == what, c.ended_at.is_(None), *(() if job_id is None else (c.job_id == job_id,))
        )

    def end_node_entry(self, entry: NodeEntry, at: float, why: str) -> None:
        """It is taken back, or not ours any more."""
        self._entries.save(replace(entry, ended_at=at, ended_why=why))

    # -- pause

    def pause(self, reason: str, by: str, at: float) -> None:
        """No action from now on, until resume. Paused already: the first reason stays."""
        with self._database.transaction() as sql:
            if sql.execute(sa.select(PAUSES.c.id).where(PAUSES.c.resumed_at.is_(None))).first() is None:
                sql.execute(sa.insert(PAUSES).values(reason=plain(reason), paused_by=plain(by), paused_at=at))

    def resume(self, by: str, at: float) -> None:
        """End the pause, if there is one."""
        ended = {"resumed_by": plain(by), "resumed_at": at}
        self._database.change(sa.update(PAUSES).where(PAUSES.c.resumed_at.is_(None)).values(ended))

    def paused(self) -> tuple[str, str, float] | None:
        """(reason, user, since when) while paused, else None."""
        query = sa.select(PAUSES).where(PAUSES.c.resumed_at.is_(None)).order_by(PAUSES.c.id)
        row = next(iter(self._database.rows(query)), None)
        return None if row is None else (row.reason, row.paused_by, row.paused_at)


def one_operation(decision_id: str, operation: Operation, attempt: int) -> tuple[sa.ColumnElement[bool], ...]:
    """The conditions that find one attempt of one operation."""
    return (
        OPERATIONS.c.decision_id == decision_id,
        OPERATIONS.c.operation == operation.value,
        OPERATIONS.c.attempt == attempt,
    )
