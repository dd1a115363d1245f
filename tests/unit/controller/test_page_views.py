"""What the page says is being done, what it leaves to a person, and what a job has been through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.api.answers import history
from slurm_watchdog.controller.health.views import action_of
from slurm_watchdog.controller.health.views import todo as todo_rows
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, Decision, Verdict
from slurm_watchdog.model.documents import Waiting
from slurm_watchdog.model.incidents import Incident, Severity
from slurm_watchdog.model.page_documents import History, Todo
from slurm_watchdog.model.run_record import RunRecord
from tests.builders.notices import DECISION, INCIDENT, RUN


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    found = Journal(f"sqlite:///{tmp_path}/journal.sqlite")
    found.save_incident(INCIDENT)
    yield found
    found.close()


def all_seen(_: Incident) -> bool:
    return True


def none_seen(_: Incident) -> bool:
    return False


def todo(journal: Journal, *incidents: Incident, quiet: tuple[str, ...] = (), sees: Any = all_seen) -> tuple[Todo, ...]:
    handled = {*quiet, *(run.decision.incident_id for run in journal.open_actions())}
    return todo_rows(incidents or (INCIDENT,), handled, journal.decisions_about, sees)


def decided(journal: Journal, **changes: Any) -> Decision:
    made = replace(DECISION, **changes)
    journal.add_decision(made)
    return made


def test_what_is_under_way_is_being_done_and_nobody_has_to_do_it(journal: Journal) -> None:
    decided(journal)
    (run,) = journal.open_actions()
    row, told = action_of(run, Waiting(what="a checkpoint", until=300.0)), action_of(run, whole=False)
    assert row.waiting is not None and (row.waiting.what, row.waiting.until) == ("a checkpoint", 300.0)
    for each in (row, told):
        assert (each.incident_id, each.job_id, each.action) == ("i1", "7", "graceful_restart")
    assert (row.reason, told.reason, told.operations) == (DECISION.reason, "", ())
    assert todo(journal) == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verdict": Verdict.SUPPRESSED, "by": "budget"}, "graceful_restart was not done (budget): a rank is stuck"),
        ({"verdict": Verdict.OBSERVED, "by": "mode"}, "graceful_restart would have been done (mode): a rank is stuck"),
        ({"action": Action.NONE, "verdict": Verdict.SUPPRESSED}, "reported only (collective_hang): a rank is stuck"),
    ],
)
def test_what_was_not_done_is_left_to_a_person_with_the_reason(
    journal: Journal, changes: dict[str, Any], why: str
) -> None:
    decided(journal, **changes)
    (row,) = todo(journal)
    assert row.why == why
    (row,) = todo(journal, sees=none_seen)
    assert row.why == why.partition(":")[0]


def test_an_action_that_has_ended_and_did_not_help_leaves_it_to_a_person(journal: Journal) -> None:
    decided(journal)
    assert RUN.end is not None
    journal.end_action(DECISION.id, RUN.end)
    assert todo(journal)[0].why == "graceful_restart has ended, and it is still wrong"


def test_what_somebody_looks_after_or_another_incident_explains_is_left_to_nobody(journal: Journal) -> None:
    assert todo(journal, quiet=("i1",)) == ()
    assert todo(journal, replace(INCIDENT, inhibited_by="i0")) == ()
    assert [each.incident for each in todo(journal, replace(INCIDENT, id="w", severity=Severity.WARNING), INCIDENT)] == [
        "i1", "w",
    ]  # fmt: skip


def test_a_job_has_its_runs_the_incidents_that_may_be_seen_and_what_was_done(journal: Journal) -> None:
    for number in (1, 0):
        journal.run_records.save(RunRecord(job_id="7", restarts=number, began_at=100.0 * number, seen_at=500.0))
    decided(journal)
    journal.save_incident(replace(INCIDENT, id="i2", fired_at=None))
    found = history(journal, "7", all_seen)
    assert [each.restarts for each in found.runs] == [0, 1]
    assert [each.id for each in found.incidents] == ["i1"]
    assert [(each.action, each.end) for each in found.actions] == [("graceful_restart", None)]
    assert replace(history(journal, "7", none_seen), runs=()) == History()
