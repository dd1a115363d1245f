"""Thousands of incidents at once: the tick writes them together, and the few messages are on their way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from slurm_watchdog.base import clock
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.incidents.judge import IncidentChange
from slurm_watchdog.journal.journal import JournalError
from slurm_watchdog.model.actions import Verdict
from slurm_watchdog.model.incidents import Incident
from tests.builders.busy_controller import make
from tests.builders.notices import open_journal

MANY = 200


def tell(controller: Controller, incidents: list[Incident], now: float) -> None:
    for _ in controller.news.report([IncidentChange(before=None, after=each) for each in incidents], now):
        pass


def test_a_tick_with_many_incidents_waits_for_the_disk_a_few_times_and_loses_nothing(tmp_path: Path) -> None:
    journal, commits = open_journal(tmp_path), 0

    def count(connection: object) -> None:
        nonlocal commits
        commits += 1

    async def go() -> None:
        controller, incidents = make(journal, MANY)
        now = clock.monotonic()
        sa.event.listen(journal._database.engine, "commit", count)
        tell(controller, incidents, now)
        told = commits
        controller.decider.decide(now)
        # What was decided of each before is asked of the journal, which waits for no disk; the rest is one transaction.
        decided = commits - told
        assert told <= 5
        assert decided <= MANY + 20
        decisions = journal.decisions()
        assert len(decisions) == MANY
        assert {decision.verdict for decision in decisions} == {Verdict.SUPPRESSED}
        # Each is announced; that nothing is done while the controller is blind is held back for half a minute.
        assert len(journal.outbox.pending(10 * MANY)) == MANY
        before = commits
        controller.decider.decide(now + 1.0)
        assert len(journal.decisions()) == MANY
        assert commits - before < 20
        await controller.collector.close()

    asyncio.run(go())


def test_decisions_whose_transaction_failed_are_decided_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)

    async def go() -> None:
        controller, _ = make(journal, 40)

        def full(decision: object) -> None:
            raise JournalError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(journal, "add_decision", full)
            controller.decider.decide(clock.monotonic())
        assert journal.decisions() == []
        assert controller.journal_error == "the disk is full"
        controller.writer.write(lambda: None)  # there is room again
        controller.decider.decide(clock.monotonic())
        assert len(journal.decisions()) == 40
        await controller.collector.close()

    asyncio.run(go())


@pytest.mark.parametrize("number", [5, 40])
def test_notices_that_a_full_disk_refused_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    journal = open_journal(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise JournalError("the disk is full")

    async def go() -> None:
        controller, incidents = make(journal, number)
        with monkeypatch.context() as patched:
            patched.setattr(journal._database, "transaction", full)
            tell(controller, incidents, clock.monotonic())
            assert controller.journal_error == "the disk is full"
            controller.writer.add_note(incidents[0], "a word more")
            controller.writer.catch_up()
            assert controller.journal_error == "the disk is full"
            assert "the journal cannot be written" in str(controller.blind(clock.monotonic()))
        controller.writer.catch_up()
        assert controller.journal_error is None
        assert {each.id for each in journal.load_open_incidents()} == {each.id for each in incidents}
        assert len(journal.outbox.pending(1000)) == number
        assert [text for _, text in journal.timeline(incidents[0].id)][-1] == "a word more"
        assert len(journal.timeline(incidents[-1].id)) == 1
        controller.writer.catch_up()
        assert len(journal.outbox.pending(1000)) == number
        await controller.collector.close()

    asyncio.run(go())
