"""The journal keeps what it was told, says clearly when it can't, and survives being killed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from slurm_watchdog.journal.database import Database
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.journal.tables import SCHEMA_VERSION
from slurm_watchdog.model.actions import (
    Action,
    ActionEnd,
    Operation,
    OperationOutcome,
    OperationRecord,
    Verdict,
)
from slurm_watchdog.model.incidents import IncidentState
from tests.builders.evidence_rows import add_evidence, evidence_of
from tests.builders.notices import DECISION, INCIDENT, replace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, path: Path) -> str:
    """The address of a database that is empty, of either kind."""
    return f"sqlite:///{path}" if request.param == "sqlite" else request.getfixturevalue("postgresql")()


@pytest.fixture
def journal(url: str) -> Iterator[Journal]:
    journal = Journal(url)
    yield journal
    journal.close()


@pytest.fixture
def sqlite_journal(path: Path) -> Iterator[Journal]:
    journal = Journal(f"sqlite:///{path}")
    yield journal
    journal.close()


def test_it_is_written_through_to_the_disk(sqlite_journal: Journal) -> None:
    with sqlite_journal._database.transaction() as sql:
        assert sql.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert sql.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert sql.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000


def test_incidents_come_back_whole_and_newest_first(journal: Journal) -> None:
    other = replace(INCIDENT, id="i2", job_ids=("7", "8", "8"), opened_at=300.0)
    over = replace(INCIDENT, id="i3", job_ids=("9",), opened_at=50.0, state=IncidentState.RESOLVED, resolved_at=60.0)
    for incident in (INCIDENT, other, over):
        journal.save_incident(incident)
    assert journal.incident("i1") == INCIDENT
    assert journal.incident("none") is None
    assert journal.incidents() == [other, INCIDENT, over]
    assert journal.incidents(limit=1) == [other]
    assert journal.incidents(job_id="7") == [other, INCIDENT]
    assert journal.incidents(job_id="9") == [over]
    assert journal.load_open_incidents() == [INCIDENT, other]


def test_an_incident_is_replaced_by_its_newer_self(journal: Journal) -> None:
    journal.save_incident(INCIDENT)
    newer = replace(INCIDENT, state=IncidentState.RESOLVED, job_ids=("8",), resolution="over")
    journal.save_incident(newer)
    assert journal.incidents() == [newer]
    assert journal.incidents(job_id="7") == []
    assert journal.load_open_incidents() == []


def test_evidence_and_timeline_keep_their_order(journal: Journal) -> None:
    add_evidence(journal, "i1", 2.0, "stacks", {"ranks": [1, 2], "text": "naïve\n"})
    add_evidence(journal, "i1", 1.0, "job", {})
    journal.add_note("i1", 2.0, "first")
    journal.add_note("i1", 1.0, "second")
    journal.add_note("i2", 1.0, "other")
    assert evidence_of(journal, "i1") == [
        (2.0, "stacks", {"ranks": [1, 2], "text": "naïve\n"}),
        (1.0, "job", {}),
    ]
    assert evidence_of(journal, "i2") == []
    assert journal.timeline("i1") == [(2.0, "first"), (1.0, "second")]


def test_decisions_come_back_and_never_change(journal: Journal) -> None:
    later = replace(DECISION, id="d2", incident_id="i2", decided_at=300.0, verdict=Verdict.OBSERVED)
    nothing = replace(DECISION, id="d3", incident_id="i2", decided_at=400.0, action=Action.NONE)
    for decision in (later, DECISION, nothing):
        journal.add_decision(decision)
    with pytest.raises(JournalError, match="don't change"):
        journal.add_decision(replace(DECISION, reason="another"))
    assert journal.decisions() == [DECISION, later, nothing]
    assert journal.decisions("i2") == [later, nothing]
    assert journal.decisions_since(200.0) == [DECISION]
    assert journal.decisions_since(200.1) == []


def test_an_action_is_its_decision_its_rungs_and_its_end(journal: Journal) -> None:
    journal.add_decision(DECISION)
    journal.operation_intent("d1", Operation.REQUEUE_HOLD, 1, 201.0, "job 7")
    first = OperationRecord(operation=Operation.REQUEUE_HOLD, attempt=1, intent_at=201.0, detail="job 7")
    (run,) = journal.open_actions()
    assert (run.decision, run.records, run.end) == (DECISION, (first,), None)

    journal.operation_outcome("d1", Operation.REQUEUE_HOLD, 1, OperationOutcome.UNKNOWN, 202.0, "no answer")
    journal.operation_intent("d1", Operation.REQUEUE_HOLD, 2, 203.0)
    journal.operation_outcome("d1", Operation.REQUEUE_HOLD, 2, OperationOutcome.DONE, 204.0, "")
    end = ActionEnd(ok=True, ended_at=205.0, detail="runs again", resumed_at_step=10, steps_lost=2, downtime_s=3.5)
    journal.end_action("d1", end)
    assert journal.open_actions() == []
    (run,) = journal.actions("i1")
    assert run.end == end
    assert [(r.attempt, r.outcome, r.detail) for r in run.records] == [
        (1, OperationOutcome.UNKNOWN, "no answer"), (2, OperationOutcome.DONE, ""),
    ]  # fmt: skip
    assert journal.actions("i2") == []


def test_an_outcome_is_never_written_twice_nor_without_an_intent(journal: Journal) -> None:
    journal.add_decision(DECISION)
    with pytest.raises(JournalError, match="No intent"):
        journal.operation_outcome("d1", Operation.RELEASE, 1, OperationOutcome.DONE, 1.0, "")
    journal.operation_intent("d1", Operation.RELEASE, 1, 1.0)
    with pytest.raises(JournalError, match="already in the journal"):
        journal.operation_intent("d1", Operation.RELEASE, 1, 1.0)
    journal.operation_outcome("d1", Operation.RELEASE, 1, OperationOutcome.FAILED, 2.0, "no")
    with pytest.raises(JournalError, match="failed already"):
        journal.operation_outcome("d1", Operation.RELEASE, 1, OperationOutcome.DONE, 3.0, "yes")
    (record,) = journal.open_actions()[0].records
    assert (record.outcome, record.outcome_at, record.detail) == (OperationOutcome.FAILED, 2.0, "no")


def test_nothing_is_done_for_a_decision_that_was_not_allowed_or_is_over(journal: Journal) -> None:
    journal.add_decision(replace(DECISION, verdict=Verdict.SUPPRESSED))
    for decision_id in ("d1", "unknown"):
        with pytest.raises(JournalError, match="Nothing may be done"):
            journal.operation_intent(decision_id, Operation.RELEASE, 1, 1.0)
    assert journal.open_actions() == []
    journal.add_decision(replace(DECISION, id="d2"))
    journal.end_action("d2", ActionEnd(ok=False, ended_at=1.0, detail="given up"))
    with pytest.raises(JournalError, match="ended already"):
        journal.end_action("d2", ActionEnd(ok=True, ended_at=2.0, detail="no, it worked"))
    with pytest.raises(JournalError, match="ended already"):
        journal.operation_intent("d2", Operation.RELEASE, 1, 1.0)


def test_a_pause_lasts_over_a_restart_until_it_is_resumed(url: str) -> None:
    first = Journal(url)
    assert first.paused() is None
    first.pause("maintenance", "ann", 10.0)
    first.pause("again", "bob", 11.0)
    first.close()
    second = Journal(url)
    assert second.paused() == ("maintenance", "ann", 10.0)
    second.resume("bob", 12.0)
    second.resume("bob", 13.0)
    assert second.paused() is None
    second.pause("once more", "ann", 14.0)
    assert second.paused() == ("once more", "ann", 14.0)
    second.close()


def test_the_outbox_keeps_messages_in_order_until_they_are_done(url: str) -> None:
    journal = Journal(url)
    for number in range(3):
        journal.outbox.add("slack", "i1", {"text": str(number)}, float(number))
    one, two, three = journal.outbox.pending(10)
    assert [item.payload["text"] for item in (one, two, three)] == ["0", "1", "2"]
    journal.outbox.done_all("slack", (two.id,))
    journal.close()
    journal = Journal(url)
    assert journal.outbox.pending(10) == [one, three]
    assert journal.outbox.first("slack") == one
    journal.outbox.done_through("slack", three.id)
    assert journal.outbox.first("slack") is None
    journal.close()


WRITER = """
import sys
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import *
from slurm_watchdog.model.incidents import *
journal = Journal("sqlite:///" + sys.argv[1])
for n in range(100000):
    d = Decision(id=f"d{n}", incident_id="i", action=Action.REQUEUE, verdict=Verdict.ALLOWED, by="r", reason="x" * 2000,
                 decided_at=float(n))
    journal.save_incident(Incident(id=f"i{n}", kind=IncidentKind.COLLECTIVE_HANG, subject="s", state=IncidentState.FIRING,
                          severity=Severity.INFO, job_ids=("1", "2"), opened_at=float(n), pending_mono=0.0))
    journal.add_decision(d)
    journal.operation_intent(d.id, Operation.REQUEUE_HOLD, 1, 1.0)
    journal.operation_outcome(d.id, Operation.REQUEUE_HOLD, 1, OperationOutcome.DONE, 2.0, "done")
    print(n, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 7, 20])
def test_a_writer_that_is_killed_leaves_nothing_half_and_loses_nothing(path: Path, lines: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(lines):
        said = int(writer.stdout.readline())
    time.sleep(0.003)
    writer.send_signal(signal.SIGKILL)
    rest = writer.communicate()[0].split()
    last = max([said, *map(int, rest)])

    journal = Journal(f"sqlite:///{path}")
    runs = journal.open_actions()
    assert len(runs) - 1 in {last, last + 1}
    for run in runs[: last + 1]:
        assert [record.outcome for record in run.records] == [OperationOutcome.DONE]
    for incident in journal.incidents(limit=10**6):
        assert incident in journal.incidents(job_id="1", limit=10**6)
        assert incident in journal.incidents(job_id="2", limit=10**6)
    journal.save_incident(INCIDENT)
    journal.close()
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_corrupt_file_is_named_and_stays(path: Path) -> None:
    path.write_bytes(b"this was a journal once\n" * 500)
    before = path.read_bytes()
    with pytest.raises(JournalError, match="not an SQLite database or is damaged; move it away") as caught:
        Journal(f"sqlite:///{path}")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_pages_that_were_overwritten_are_an_error_and_no_empty_list(path: Path) -> None:
    journal = Journal(f"sqlite:///{path}")
    for number in range(200):
        add_evidence(journal, "i1", 1.0, "job", {"n": number, "text": "x" * 500})
    journal.close()
    with path.open("r+b") as file:
        file.seek(4096 * 20)
        file.write(os.urandom(4096 * 20))
    with pytest.raises(JournalError, match=r"damaged|cannot be read"):
        again = Journal(f"sqlite:///{path}")
        evidence_of(again, "i1")


def test_a_document_that_can_not_be_read_is_an_error(sqlite_journal: Journal, path: Path) -> None:
    sqlite_journal.save_incident(INCIDENT)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE incidents SET document = '{\"id\": 5}'")
    with pytest.raises(JournalError, match="cannot be read"):
        sqlite_journal.incidents()


def test_a_newer_schema_is_refused(path: Path) -> None:
    Journal(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as other:
        other.execute("UPDATE journal_schema SET version = ?", (SCHEMA_VERSION + 1,))
    with pytest.raises(JournalError, match=f"schema version {SCHEMA_VERSION + 1}.*install the release"):
        Journal(f"sqlite:///{path}")


def test_a_database_of_other_software_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE incidents (mine TEXT)")
    with pytest.raises(JournalError, match="other software"):
        Journal(f"sqlite:///{path}")
    assert [row[0] for row in sqlite3.connect(path).execute("SELECT name FROM sqlite_master")] == ["incidents"]


def test_a_missing_directory_and_a_nonsense_address_are_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened; its directory must exist"):
        Journal(f"sqlite:///{tmp_path}/no/where/journal.sqlite")
    with pytest.raises(JournalError, match=r"controller\.journal_url"):
        Journal("not an address")


def test_a_password_in_the_address_is_not_shown() -> None:
    with pytest.raises(JournalError) as caught:
        Journal("postgresql://ann:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


def test_another_writer_is_waited_for_and_then_named(sqlite_journal: Journal, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(f"sqlite:///{path}", partial(Database, busy_ms=100))
    other.execute("ROLLBACK")
    sqlite_journal.save_incident(INCIDENT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small filesystem needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_is_said_and_overcome(small_disk: Path) -> None:
    journal = Journal(f"sqlite:///{small_disk}/journal.sqlite")
    journal.save_incident(INCIDENT)
    (small_disk / "filler").write_bytes(b"")
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(b"x" * 4096)
    with pytest.raises(JournalError, match=r"its disk is full|disk reports errors"):
        for number in range(2000):
            add_evidence(journal, "i1", 1.0, "job", {"n": number, "text": "x" * 2000})
    kept = evidence_of(journal, "i1")
    (small_disk / "filler").unlink()
    add_evidence(journal, "i1", 1.0, "job", {})
    assert len(evidence_of(journal, "i1")) == len(kept) + 1
    assert journal.load_open_incidents() == [INCIDENT]
    journal.close()


def test_a_disk_that_became_read_only_is_said(small_disk: Path) -> None:
    Journal(f"sqlite:///{small_disk}/journal.sqlite").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(JournalError, match=r"read-only|cannot be opened"):
        journal = Journal(f"sqlite:///{small_disk}/journal.sqlite")
        journal.save_incident(INCIDENT)


def test_large_evidence_is_kept_compressed_and_read_back_whole(sqlite_journal: Journal, path: Path) -> None:
    document = {"ranks": [{"frames": ["train", "step"] * 50, "rank": rank} for rank in range(100)]}
    add_evidence(sqlite_journal, "i1", 1.0, "node", document)
    add_evidence(sqlite_journal, "i1", 2.0, "diagnosis", {"summary": "short"})
    assert [kind for _, kind, _ in evidence_of(sqlite_journal, "i1")] == ["node", "diagnosis"]
    assert evidence_of(sqlite_journal, "i1")[0][2] == document
    numbers = [piece.number for piece in sqlite_journal.evidence.pieces("i1")]
    assert msgspec.json.decode(sqlite_journal.evidence.document("i1", numbers[0]) or b"") == document
    assert sqlite_journal.evidence.document("i2", numbers[0]) is None
    with sqlite3.connect(path) as sql:
        (text,) = sql.execute("select document from evidence where kind = 'node'").fetchone()
    assert len(text) < len(msgspec.json.encode(document)) / 5


@pytest.mark.parametrize("damage", ["zlib:!!", "zlib:AAAA", "zlib:eJw="])
def test_damaged_packed_evidence_is_told_and_not_guessed(journal: Journal, damage: str) -> None:
    journal.evidence.add("i1", 1.0, "node", damage)
    with pytest.raises(JournalError, match="cannot be read"):
        evidence_of(journal, "i1")


def test_old_evidence_goes_and_the_story_stays(journal: Journal) -> None:
    journal.save_incident(INCIDENT)
    journal.add_note("i1", 10.0, "fires")
    add_evidence(journal, "i1", 10.0, "job", {})
    add_evidence(journal, "i1", 99.0, "job", {})
    assert journal.evidence.forget(before=50.0) == 1
    assert [at for at, _, _ in evidence_of(journal, "i1")] == [99.0]
    assert journal.timeline("i1") == [(10.0, "fires")]


def test_what_is_written_together_is_there_together_or_not_at_all(journal: Journal) -> None:
    with journal.together():
        journal.add_note("i1", 1.0, "one")
        journal.add_note("i2", 1.0, "two")
        assert [text for _, text in journal.timeline("i1")] == ["one"]
    with pytest.raises(ZeroDivisionError), journal.together():
        journal.add_note("i1", 2.0, "never")
        raise ZeroDivisionError
    journal.add_note("i1", 3.0, "alone")
    assert [text for _, text in journal.timeline("i1")] == ["one", "alone"]


def test_thousands_that_are_written_together_are_as_if_written_one_by_one(tmp_path: Path) -> None:
    alone, together = Journal(f"sqlite:///{tmp_path}/a.sqlite"), Journal(f"sqlite:///{tmp_path}/b.sqlite")

    def fill(journal: Journal) -> None:
        for number in range(50):
            found = replace(INCIDENT, id=f"i{number % 30}", job_ids=(str(number), "9"), opened_at=float(number))
            journal.save_incident(found)
            journal.add_note(found.id, float(number), f"note {number}")
            add_evidence(journal, found.id, 1.0, "job", {"n": number})
            journal.add_decision(replace(DECISION, id=f"d{number}", incident_id=found.id))
            journal.outbox.add("slack", found.id, {"n": number}, 1.0)

    fill(alone)
    with together.together():
        fill(together)
    for number in range(30):
        name = f"i{number}"
        assert together.incident(name) == alone.incident(name)
        assert together.timeline(name) == alone.timeline(name)
        assert evidence_of(together, name) == evidence_of(alone, name)
        assert together.decisions(name) == alone.decisions(name)
    for number in range(50):
        assert together.incidents(job_id=str(number)) == alone.incidents(job_id=str(number))
    assert together.outbox.pending(100) == alone.outbox.pending(100)
    assert together.decisions_about(["i1", "none"]) == {"i1": alone.decisions("i1"), "none": []}


def test_one_row_that_is_refused_fails_all_that_was_written_with_it(journal: Journal) -> None:
    journal.add_decision(DECISION)
    with pytest.raises(JournalError, match="don't change"), journal.together():
        journal.add_note("i1", 1.0, "gone")
        journal.add_decision(DECISION)
        with pytest.raises(JournalError):
            journal.decisions()  # to read, what waits is written
        journal.add_note("i1", 2.0, "gone, too")
    assert journal.timeline("i1") == []
    journal.add_note("i1", 3.0, "as ever")
    assert journal.timeline("i1") == [(3.0, "as ever")]
