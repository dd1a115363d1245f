"""Journals of older releases, the ledger of nodes, and a real PostgreSQL where there is one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.actions.ladder.state import ladder_of
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.journal.tables import SCHEMA_VERSION
from slurm_watchdog.model.actions import ActionEnd, Operation, OperationOutcome, Rung
from slurm_watchdog.model.incidents import Silence
from tests.builders.evidence_rows import add_evidence, evidence_of
from tests.builders.notices import DECISION, INCIDENT

SCHEMA_1 = """
CREATE TABLE journal_schema (version INTEGER NOT NULL);
CREATE TABLE incidents (id VARCHAR(64) NOT NULL, state VARCHAR(16) NOT NULL, kind VARCHAR(64) NOT NULL, opened_at FLOAT NOT NULL,
  document TEXT NOT NULL, PRIMARY KEY (id));
CREATE TABLE incident_jobs (incident_id VARCHAR(64) NOT NULL, job_id VARCHAR(64) NOT NULL, PRIMARY KEY (incident_id, job_id));
CREATE TABLE evidence (id INTEGER NOT NULL, incident_id VARCHAR(64) NOT NULL, at FLOAT NOT NULL, kind VARCHAR(64) NOT NULL,
  document TEXT NOT NULL, PRIMARY KEY (id));
CREATE TABLE decisions (id VARCHAR(64) NOT NULL, incident_id VARCHAR(64) NOT NULL, verdict VARCHAR(16) NOT NULL,
  action VARCHAR(32) NOT NULL, decided_at FLOAT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (id));
CREATE TABLE rungs (id INTEGER NOT NULL, decision_id VARCHAR(64) NOT NULL, rung VARCHAR(32) NOT NULL, attempt INTEGER NOT NULL,
  intent_at FLOAT NOT NULL, outcome VARCHAR(16), outcome_at FLOAT, detail TEXT NOT NULL, PRIMARY KEY (id),
  UNIQUE (decision_id, rung, attempt));
CREATE TABLE action_ends (decision_id VARCHAR(64) NOT NULL, document TEXT NOT NULL, PRIMARY KEY (decision_id));
CREATE TABLE pauses (id INTEGER NOT NULL, reason TEXT NOT NULL, paused_by VARCHAR(255) NOT NULL, paused_at FLOAT NOT NULL,
  resumed_by VARCHAR(255), resumed_at FLOAT, PRIMARY KEY (id));
CREATE TABLE timeline (id INTEGER NOT NULL, incident_id VARCHAR(64) NOT NULL, at FLOAT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (id));
CREATE TABLE outbox (id INTEGER NOT NULL, channel VARCHAR(32) NOT NULL, incident_id VARCHAR(64) NOT NULL, payload TEXT NOT NULL,
  added_at FLOAT NOT NULL, done BOOLEAN NOT NULL, attempts INTEGER NOT NULL, retry_at FLOAT NOT NULL, error TEXT NOT NULL,
  PRIMARY KEY (id));
INSERT INTO journal_schema VALUES (1);
INSERT INTO decisions VALUES ('d1', 'i1', 'allowed', 'requeue', 200.0, '{"id":"d1","incident_id":"i1","action":"requeue",
  "verdict":"allowed","by":"rule","reason":"why","decided_at":200.0,"fence":{"job_id":"7","restarts":0,"start_at":90.0}}');
INSERT INTO rungs VALUES (1, 'd1', 'requeue_hold', 1, 201.0, NULL, NULL, '');
INSERT INTO pauses VALUES (1, 'maintenance', 'root', 100.0, NULL, NULL);
"""
"""As the first releases wrote it, with an action that was under way."""


def test_a_journal_of_schema_1_is_taken_over_with_the_action_that_was_under_way(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript(SCHEMA_1)
    old.close()
    journal = Journal(f"sqlite:///{path}")
    (run,) = journal.open_actions()
    assert ladder_of(run.decision) == (Rung.EVIDENCE, Rung.REQUEUE)
    assert [(r.operation, r.outcome) for r in run.records] == [(Operation.REQUEUE_HOLD, None)]
    assert journal.paused() == ("maintenance", "root", 100.0)
    journal.node_entry("n1", "excluded", run.decision, 300.0)
    journal.close()
    with sqlite3.connect(path) as now:
        assert now.execute("SELECT version FROM journal_schema").fetchone() == (SCHEMA_VERSION,)
    now.close()
    Journal(f"sqlite:///{path}").close()


def test_what_a_person_has_acknowledged_is_over_and_all_else_goes_on(tmp_path: Path) -> None:
    """Schema 13, as the release before wrote it."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(f"sqlite:///{path}")
    silence = Silence(id="s1", by="ann", at=1.0, until=9e9, nodes=("n1",), reason='no "until": here')
    journal.silences.save(silence)
    journal.close()
    with sqlite3.connect(path) as old:
        document = '{"id":"a1","by":"bob","at":1.0,"reason":"no \\"until\\": here","incident_id":"i1"}'
        old.execute("INSERT INTO silences (id, document, ended_why) VALUES ('a1', ?, '')", (document,))
        old.execute("UPDATE journal_schema SET version = 13")
    old.close()
    journal = Journal(f"sqlite:///{path}")
    assert journal.silences.open() == [silence]
    journal.close()


def everything(url: str) -> None:
    """What the controller does with a journal, once."""
    journal = Journal(url)
    journal.save_incident(INCIDENT)
    journal.save_incident(replace(INCIDENT, summary="again"))
    journal.add_note("i1", 1.0, "fires")
    add_evidence(journal, "i1", 1.0, "node", {"a": "b" * 5000})
    journal.add_decision(DECISION)
    with pytest.raises(JournalError, match="don't change"):
        journal.add_decision(DECISION)
    journal.operation_intent("d1", Operation.REQUEUE_HOLD, 1, 2.0)
    journal.operation_outcome("d1", Operation.REQUEUE_HOLD, 1, OperationOutcome.DONE, 3.0, "held")
    with pytest.raises(JournalError, match="stays so"):
        journal.operation_outcome("d1", Operation.REQUEUE_HOLD, 1, OperationOutcome.FAILED, 3.0, "no")
    journal.node_entry("n1", "excluded", DECISION, 4.0)
    journal.node_entry("n1", "excluded", DECISION, 5.0)
    journal.node_entry("n2", "drained", DECISION, 4.0, "slurm-watchdog: x", 3.5)
    journal.pause("x", "root", 5.0)
    journal.outbox.add("slack", "i1", {"text": "x"}, 5.0)
    journal.close()
    journal = Journal(url)
    (run,) = journal.open_actions()
    assert run.records[0].detail == "held"
    journal.end_action("d1", ActionEnd(ok=True, ended_at=6.0, detail="done"))
    assert not journal.open_actions() and journal.actions("i1")[0].end is not None
    assert journal.paused() == ("x", "root", 5.0)
    assert [entry.node for entry in journal.node_entries("excluded", "7")] == ["n1"]
    assert not journal.node_entries("excluded", "8")
    (drained,) = journal.node_entries("drained")
    assert (drained.reason, drained.reason_at) == ("slurm-watchdog: x", 3.5)
    journal.end_node_entry(drained, 7.0, "given back")
    assert not journal.node_entries("drained")
    assert evidence_of(journal, "i1")[0][2] == {"a": "b" * 5000}
    assert journal.incidents()[0].summary == "again"
    assert len(journal.outbox.pending(10)) == 1
    with journal.together():
        journal.add_note("i1", 8.0, "one")
        journal.add_note("i1", 8.0, "two")
    assert len(journal.timeline("i1")) == 3
    journal.close()


def test_everything_that_a_journal_does_on_sqlite(tmp_path: Path) -> None:
    everything(f"sqlite:///{tmp_path / 'journal.sqlite'}")


def test_everything_that_a_journal_does_on_postgresql(postgresql: Callable[[], str]) -> None:
    everything(postgresql())
