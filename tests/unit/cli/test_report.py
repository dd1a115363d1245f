"""`report` and `story`: from what a controller sees of runs, by the journal, to what people read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.cli.ask import print_report
from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.health.lost_time import report_asked
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.controller.run_records import RunRecords
from slurm_watchdog.journal.database import Database
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.journal.reports import spells_of
from slurm_watchdog.journal.tables import JOB_RUNS
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.actions import Action, Fence, Verdict
from slurm_watchdog.model.incidents import IncidentState
from slurm_watchdog.model.past_runs import EndedJob
from slurm_watchdog.model.run_record import Report, RunRecord
from slurm_watchdog.report.story import intervals, paired, run_row
from slurm_watchdog.slurm.accounting import (
    FIELDS,
    OPTIONAL,
    NoAccounting,
    parse_accounting,
    read_accounting,
    without,
)
from slurm_watchdog.slurm.commands import Commands
from tests.builders.cli import run
from tests.builders.crash_loops import run as past_run
from tests.builders.notices import DECISION, INCIDENT, RUN
from tests.builders.open_doors import OWNER, STRANGE, Controller
from tests.builders.views import cluster, job, progress, slurm_job

CAPTURES = Path(__file__).parents[2] / "captures" / "slurm" / "22.05"
PLAIN = without(FIELDS, *OPTIONAL)
"""What the captured sacct was asked for."""
T, H = 1_700_000_000.0, 3600.0
NOW = 10_000.0
"""Of the monotonic clock, as `cluster` has it."""


def record(number: int, began_h: float, ended_h: float, **changes: Any) -> RunRecord:
    given: dict[str, Any] = {
        "job_id": "7", "restarts": number, "began_at": T + began_h * H, "ended_at": T + ended_h * H, "seen_at": T + ended_h * H,
        "first_rise_at": T + (began_h + 0.25) * H, "last_rise_at": T + ended_h * H, "step_s": 10.0, "first_step": 0, "last_step": 810,
        "uid": OWNER, "user": "ann", "account": "vision", "partition": "gpu", "name": "gpt", "nodes": 10, "state": "COMPLETED",
    }  # fmt: skip
    return RunRecord(**{**given, **changes})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """Job 7 hung for 7.5 h, was requeued, and made half an hour of steps again; another one was well."""
    found = Journal(f"sqlite:///{tmp_path}/journal.sqlite")
    found.run_records.save(record(0, 0, 10, state="RUNNING", last_rise_at=T + 2.5 * H))
    found.run_records.save(record(1, 10.5, 13, first_step=630, last_step=1440))
    found.run_records.save(record(0, 0, 2.5, job_id="8", user="bob", uid=STRANGE, account="speech", nodes=1))
    found.save_incident(replace(INCIDENT, state=IncidentState.RESOLVED, opened_at=T + 2.5 * H, resolved_at=T + 10 * H))
    assert RUN.end is not None
    found.add_decision(replace(DECISION, action=Action.REQUEUE, decided_at=T + 10 * H))
    found.end_action(DECISION.id, replace(RUN.end, ended_at=T + 10.75 * H))
    yield found
    found.close()


def asked(journal: Journal, command: str, *arguments: str) -> str:
    path = journal.url.removeprefix("sqlite:///")
    result = run(command, *arguments, "--journal", path)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_report_says_what_was_kept_what_was_lost_to_what_and_how_often_to_save(journal: Journal) -> None:
    said = asked(journal, "report", "--from", "2023-11-01")
    first = said.splitlines()[0]
    assert "2 jobs had 127.5 node-hours" in first and "33.1% went into steps that were kept" in first
    assert "collective_hang   75.0        58.8%" in said
    assert "recomputed steps  5.0         3.9%" in said
    row = next(line for line in said.splitlines() if line.startswith("7 "))
    assert row.split()[:7] == ["7", "125.0", "32.0%", "2", "gpt", "ann", "10"]
    assert "Incidents: 1 collective_hang." in said and "Nodes named most: n1 (1)." in said
    assert "1 run failed or had to be ended, one in 127.5 node-hours: too few to advise an interval" in said


def test_what_waited_to_be_noticed_is_said_in_the_table_and_json(journal: Journal) -> None:
    late = replace(INCIDENT, state=IncidentState.RESOLVED, opened_at=T + 2.5 * H, resolved_at=T + 10 * H)
    journal.save_incident(replace(late, fired_at=T + 4.0 * H))
    dates = ("--from", "2023-11-01")
    said = asked(journal, "report", *dates)
    row = next(line for line in said.splitlines() if line.startswith("collective_hang"))
    assert row.split() == ["collective_hang", "75.0", "58.8%", "15.0"]
    assert "15.0 node-hours were spent waiting to be noticed" in said
    assert json.loads(asked(journal, "report", *dates, "--json"))["to_be_noticed_h"] == [["collective_hang", 15.0]]
    assert "15.0 node-hours were spent waiting" in asked(journal, "story", "7", "--no-accounting")


def test_what_mode_act_would_have_saved_is_said_in_the_terminal_and_json(journal: Journal) -> None:
    """The hang stood from 2.5 h to 10 h on 10 nodes; after half an hour its restart was decided, and observed."""
    journal.run_records.save(record(0, 0, 10, job_id="9", state="CANCELLED", last_rise_at=T + 2.5 * H))
    of = {"id": "i9", "job_ids": ("9",), "runs": (("9", 0),)}
    journal.save_incident(replace(INCIDENT, **of, opened_at=T + 2.5 * H, resolved_at=T + 10 * H))
    fence = Fence(job_id="9", restarts=0, start_at=None)
    decided = replace(
        DECISION, id="first", incident_id="i9", verdict=Verdict.OBSERVED, by="mode", fence=fence, decided_at=T + 3 * H
    )
    journal.add_decision(decided)
    journal.add_decision(replace(decided, id="later", decided_at=T + 5 * H))
    journal.add_decision(replace(decided, id="other", fence=replace(fence, restarts=1), decided_at=T))
    words = "In mode act 70.0 node-hours more would have been saved, in 1 run: "
    assert words in asked(journal, "report", "--from", "2023-11-01").replace("\n", " ")
    found = report_asked(journal.url, {"from": str(T), "to": str(T + 100 * H)})
    assert (found.savings.would_save_h, found.savings.observed) == (70.0, 1)
    assert json.loads(asked(journal, "report", "--from", "2023-11-01", "--json"))["savings"]["would_save_h"] == 70.0


def test_jobs_that_were_saved_for_maintenance_are_no_failures_and_nothing_is_said_of_what_that_saved(
    journal: Journal,
) -> None:
    assert RUN.end is not None
    for number, kind in enumerate(("ends_soon", "operator_restart")):
        job_id, ended_at = f"{20 + number}", T + 30 * H
        journal.run_records.save(record(0, 20, 30, job_id=job_id))
        of = {"id": f"m{number}", "kind": kind, "job_ids": (job_id,), "runs": ((job_id, 0),)}
        journal.save_incident(replace(INCIDENT, **of, opened_at=ended_at - 60, resolved_at=ended_at + 60))
        fence = Fence(job_id=job_id, restarts=0, start_at=None)
        asked_ = replace(DECISION, id=f"p{number}", incident_id=f"m{number}", decided_at=ended_at - 30, fence=fence)
        journal.add_decision(asked_)
        journal.end_action(asked_.id, replace(RUN.end, ended_at=ended_at + 60))
    found = report_asked(journal.url, {"from": str(T), "to": str(T + 100 * H)})
    assert (found.failures, found.savings.unknown, found.nodes) == (1, 1, (("n1", 1),))


def test_an_action_counts_for_the_job_that_it_was_about_alone() -> None:
    assert RUN.end is not None
    shared = replace(INCIDENT, job_ids=("7", "8", "9"), runs=(("7", 0), ("8", 0), ("9", 2)))
    fence = Fence(job_id="9", restarts=2, start_at=None)
    ends = [(replace(DECISION, action=Action.RESTART_STEP, fence=fence), replace(RUN.end, seconds_lost=90.0))]
    spells = spells_of(shared, ends, T)
    assert [(each.job_id, each.acted, each.recomputed_s) for each in spells] == [
        ("7", False, 0.0), ("8", False, 0.0), ("9", True, 90.0),
    ]  # fmt: skip


def test_advice_names_the_formula_that_fits_how_long_a_checkpoint_takes(journal: Journal) -> None:
    """12.75 h between two failures of a job on 10 nodes, 127.5 h of one on 1 node; saving takes an hour."""
    found = json.loads(asked(journal, "report", "--from", "2023-11-01", "--json")) | {"failures": 10}
    said = intervals(msgspec.convert(found, Report), 3600.0)
    assert said == "15 h 58 min on 1 node (Young 1974), 4 h 24 min on 10 nodes (Daly 2006)"
    assert "(Young 1974)" not in intervals(msgspec.convert(found, Report), 7200.0)


def test_what_a_small_run_lost_is_said_in_minutes(journal: Journal) -> None:
    found = json.loads(asked(journal, "report", "--from", "2023-11-01", "--json"))
    small = found | {"allocated_h": 0.1, "measured_h": 0.1, "effective_h": 0.07, "lost_h": [["collective_hang", 0.03]]}
    with redirect_stdout(StringIO()) as printed:
        print_report(msgspec.convert(small, Report), 60.0)
    said = " ".join(printed.getvalue().split())
    assert "had 6 node-minutes: of the 6 node-minutes" in said and "2 node-minutes were lost" in said
    assert "collective_hang 2 min 30.0%" in said


def test_a_report_of_one_account_counts_nobody_else(journal: Journal) -> None:
    said = asked(journal, "report", "--from", "2023-11-01", "--account", "speech", "--json")
    (only,) = json.loads(said)["jobs"]
    assert (only["job_id"], only["allocated_h"], only["share"]) == ("8", 2.5, 0.9)
    assert "no job ran" in asked(journal, "report", "--from", "2023-11-01", "--user", "eve")


def test_a_story_has_each_run_what_happened_and_what_it_cost(journal: Journal) -> None:
    said = asked(journal, "story", "7", "--no-accounting")
    assert said.startswith("Job 7 (gpt, ann): 2 runs, 1 incident, 125.0 node-hours, 32.0% of its measured time")
    lines = said.splitlines()
    hang, restart = (
        next(n for n, line in enumerate(lines) if words in line)
        for words in ("rank 3 waits alone", "requeue: runs on n2")
    )
    assert hang < restart
    assert "630 to 1440" in said and "waited 30 min in the queue" in said


def test_a_story_of_a_job_that_nobody_knows_says_so(journal: Journal) -> None:
    assert "No run of job 99 is known" in asked(journal, "story", "99", "--no-accounting")


def test_people_are_answered_about_their_own_jobs(tmp_path: Path) -> None:
    controller: Any = Controller(tmp_path)
    controller.journal.run_records.save(record(0, 0, 2))
    controller.journal.run_records.save(record(0, 0, 2, job_id="8", uid=STRANGE))

    def jobs(person: int, query: str = "") -> tuple[int, list[str]]:
        async def go() -> tuple[int, Any]:
            async with TestClient(TestServer(make_app(controller, lambda _: Person(person)))) as client:
                answer = await client.get(f"/v1/report?from=0{query}")
                return answer.status, await answer.json()

        status, told = asyncio.run(go())
        return status, sorted(each["job_id"] for each in told.get("jobs", ()))

    assert jobs(0) == (200, ["7", "8"])
    assert jobs(OWNER) == (200, ["7"])
    assert jobs(STRANGE, "&job=7") == (200, [])
    assert jobs(0, "&to=never") == (400, [])
    assert jobs(0, "&to=-1") == (400, [])


def test_a_report_holds_up_nobody_who_writes_the_journal(journal: Journal) -> None:
    database = Database(journal.url, read_only=True)
    with database.together():
        database.rows(sa.select(sa.text("1")))
        journal.run_records.save(record(5, 0, 1))
    with pytest.raises(JournalError):
        database.change(sa.delete(JOB_RUNS))
    database.close()


def test_a_run_is_kept_from_its_beginning_to_its_end_also_by_a_controller_that_was_started_in_between(
    journal: Journal,
) -> None:
    def see(kept: RunRecords, age_s: float, **view: Any) -> None:
        kept.update(replace(cluster(**view), now=NOW + age_s), T + age_s)

    writer = JournalWriter(journal, LeftOut())
    running = job(
        job=slurm_job(job_id="9", start_at=T - 60.0, uid=5),
        run_age_s=60.0,
        progress=progress(5.0, step=100, first_step=90),
    )
    first = RunRecords(journal, writer, NOW, T)
    see(first, 0.0, jobs=(running,))
    later = RunRecords(journal, writer, NOW + 500.0, T + 500.0)
    over = replace(
        past_run(0), restarts=0, began_at=NOW + 400.0, ended_at=NOW + 900.0, steps_seen=2, first_step=300, last_step=400
    )
    see(later, 1000.0, ended=(EndedJob(job=running.job, ended_at=NOW + 900.0, run=over),))
    see(later, 1100.0, ended=(EndedJob(job=running.job, ended_at=NOW + 900.0, run=replace(over, last_step=None)),))
    (found,) = journal.run_records.of(job_id=["9"])
    assert (found.began_at, found.ended_at, found.first_step, found.last_step) == (T - 60.0, T + 900.0, 90, 400)
    assert (found.first_rise_at, found.uid, found.watched_from) == (T - 5.0, 5, None)
    long = job(job=slurm_job(job_id="10", start_at=T - 9000.0), progress=progress(5.0, step=900))
    see(later, 1200.0, jobs=(long,))
    assert journal.run_records.of(job_id=["10"])[0].watched_from == T + 1200.0


def test_what_sacct_prints_is_read_and_what_makes_no_sense_is_left_out() -> None:
    text = (
        "7|NODE_FAIL|0:0|1700000000|1700003600|4|n[1-4]|ann|vision|gpu|a|b\n"
        "7|CANCELLED by 1000|0:15|1700007200|1700007260|4|n[1-4]|ann|vision|gpu|gpt\n"
        "7|RUNNING|0:0|1700010000|Unknown|4|n[1-4]|ann|vision|gpu|gpt\n"
        "7|PENDING|0:0|Unknown|Unknown|4|None assigned|ann|vision|gpu|gpt\n"
        "7|CANCELLED by 0|0:0|1700010001|1700010001|4|None assigned|ann|vision|gpu|gpt\n"
        "70|RUNNING|0:0|1700010000|Unknown|4|n1|ann|vision|gpu|gpt\n"
        "7_1|RUNNING|0:0|1700010000|Unknown|4|n1|ann|vision|gpu|gpt\n"
        "7|RUNNING|0:0|170001\n\x00|||\n7|X|x|2|1|x|n1|||\n"
    )
    found = parse_accounting(text, "7", PLAIN)
    assert [(each.state, each.exit_code, each.ended_at, each.name) for each in found] == [
        ("NODE_FAIL", "0:0", 1700003600.0, "a|b"),
        ("CANCELLED", "0:15", 1700007260.0, "gpt"),
        ("RUNNING", "", None, "gpt"),
    ]


@pytest.mark.parametrize(
    ("what", "ends"),
    [
        ("completes", [("COMPLETED", "0:0")]),
        ("fails", [("FAILED", "3:0")]),
        ("killed", [("FAILED", "0:11")]),
        ("array", []),
        ("held", []),
        ("never", []),
        ("het", [("COMPLETED", "0:0")]),
        ("odd name", [("COMPLETED", "0:0")]),
        ("two lines", [("COMPLETED", "0:0")]),
        ("cancelled", [("CANCELLED", "0:0")]),
        ("requeued", [("REQUEUED", "0:0"), ("REQUEUED", "0:0"), ("CANCELLED", "0:0")]),
        ("requeued element", [("REQUEUED", "0:0"), ("CANCELLED", "0:0")]),
        ("preempted", [("PREEMPTED", "0:0"), ("RUNNING", "")]),
        ("preempted for good", [("PREEMPTED", "0:0")]),
        ("node fails", [("NODE_FAIL", "0:0")]),
        ("node fails, requeued", [("RUNNING", "")]),
    ],
)
def test_every_run_in_what_a_real_database_said_is_known_with_its_end(what: str, ends: list[tuple[str, str]]) -> None:
    job = json.loads((CAPTURES / "accounting.json").read_text())[what]
    found = parse_accounting((CAPTURES / "accounting.txt").read_text(), job, PLAIN)
    assert [(each.state, each.exit_code) for each in found] == ends


def test_parts_of_a_heterogeneous_job_that_began_together_are_one_run() -> None:
    text = (
        "7+0|COMPLETED|0:0|1700000000|1700003600|4|n[1-4]|ann|vision|gpu|gpt\n"
        "7+1|FAILED|3:0|1700000001|1700003000|2|n[5-6]|ann|vision|gpu|gpt\n"
        "7+0|RUNNING|0:0|1700010000|Unknown|4|n[1-4]|ann|vision|gpu|gpt\n"
        "7+1|RUNNING|0:0|1700010000|Unknown|2|n[5-6]|ann|vision|gpu|gpt\n"
    )
    found = parse_accounting(text, "7", PLAIN)
    assert [(each.state, each.exit_code, each.ended_at, each.nodes) for each in found] == [
        ("FAILED", "3:0", 1700003600.0, 6),
        ("RUNNING", "", None, 6),
    ]
    assert [each.nodes for each in parse_accounting(text, "7+1", PLAIN)] == [2, 2]


def test_accounting_has_the_ends_of_the_controllers_runs_and_the_runs_that_it_has_not() -> None:
    """Requeued at once: two runs within a minute, of which the controller has seen one."""
    known = [record(0, 0, 1), record(1, 40 / 3600, 1)]
    began = (T - 9000.0, T + 1.0, T + 41.0, T + 100.0)
    before, ends = paired(known, [replace(record(0, 0, 1), began_at=at) for at in began])
    assert [each.began_at for each in before] == [T - 9000.0, T + 100.0]
    assert {place: each.began_at for place, each in ends.items()} == {0: T + 1.0, 1: T + 41.0}


SACCT = """#!/bin/sh
case "$*" in
  *FailedNode*{refuses}) echo 'sacct: error: Invalid field requested: "FailedNode"' >&2; exit 1;;
  *Nonsense*) exit 1;;
esac
printf '%s\\n' '{line}'
"""


def ask_sacct(tmp_path: Path, line: str, refuses: str = "never") -> list[RunRecord]:
    """`refuses`: empty for a release without FailedNode."""
    (tmp_path / "sacct").write_text(SACCT.format(line=line, refuses=refuses))
    (tmp_path / "sacct").chmod(0o755)
    return asyncio.run(read_accounting(Commands(str(tmp_path), {"PATH": "/usr/bin:/bin"}), "7"))


def test_accounting_has_the_exit_of_the_steps_the_node_that_failed_and_what_was_waited_for(tmp_path: Path) -> None:
    row = "7|NODE_FAIL|1:0|1700000000|1700003600|4|n[1-4]|ann|vision|gpu|{}gpt"
    (found,) = ask_sacct(tmp_path, row.format("Dependency|0:9|n3|"))
    assert (found.exit_code, found.steps_exit_code, found.failed_node, found.waited_for) == (
        "1:0", "0:9", "n3", "Dependency",
    )  # fmt: skip
    (older,) = ask_sacct(tmp_path, row.format("None|0:9|"), refuses="")
    assert (older.steps_exit_code, older.failed_node, older.waited_for) == ("0:9", "", "")


@pytest.mark.parametrize("digits", [13, 5000])
def test_numbers_of_sacct_that_no_run_can_have_are_none(digits: int) -> None:
    row = "7|FAILED|1:0|1700000000|{end}|{nodes}|n1|ann|vision|gpu|gpt\n"
    text = row.format(end="1" * digits, nodes="4") + row.format(end=1700003600, nodes="9" * digits)
    unended, one = parse_accounting(text, "7", PLAIN)
    assert (unended.ended_at, unended.nodes) == (None, 4)
    assert (one.ended_at, one.nodes) == (1700003600.0, 1)


def test_sacct_that_refuses_for_another_reason_is_asked_once(tmp_path: Path) -> None:
    (tmp_path / "sacct").write_text("#!/bin/sh\necho 'Invalid field requested: \"JobID\"' >&2\nexit 1\n")
    (tmp_path / "sacct").chmod(0o755)
    with pytest.raises(NoAccounting, match="sacct failed"):
        asyncio.run(read_accounting(Commands(str(tmp_path), {"PATH": "/usr/bin:/bin"}), "7"))


def test_a_story_has_the_evidence_and_what_is_under_way(journal: Journal) -> None:
    opened = replace(
        INCIDENT, id="i2", opened_at=T + 12 * H, fired_at=T + 12 * H, facts=("no step for 90 s", "two", "three")
    )
    journal.save_incident(opened)
    journal.add_decision(replace(DECISION, id="d2", incident_id="i2", decided_at=T + 12.1 * H))
    lines = asked(journal, "story", "7", "--no-accounting").splitlines()
    (at,) = (number for number, line in enumerate(lines) if "evidence: no step for 90 s; two; and 1 more" in line)
    assert "rank 3 waits alone." in lines[at - 1] and "i2" in lines[at]
    assert any("graceful_restart: under way" in line and "i2" in line for line in lines[at:])


def test_end_of_a_run_is_told_with_all_that_accounting_says_of_it() -> None:
    whole = replace(record(0, 0, 1), exit_code="1:0", steps_exit_code="0:9", failed_node="n3", waited_for="Dependency")
    assert run_row(whole, whole)[2:] == (
        "COMPLETED",
        ["exit code 1", "of a step: signal 9", "node n3 failed", "longest wait: Dependency"],
    )
    seen = replace(whole, state="RUNNING", ended_at=None, exit_code="")
    ended = replace(whole, steps_exit_code="1:0", failed_node="", waited_for="")
    assert run_row(seen, ended) == (seen, ended, "COMPLETED", ["exit code 1"])
    assert run_row(seen, replace(ended, ended_at=None))[1] == seen
