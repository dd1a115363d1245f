"""A tick with many incidents, in pieces: what stands between two of them, and that it is the same as in one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.controller import app
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.incidents.judge import IncidentChange
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.model.incidents import Incident, IncidentState
from tests.builders.busy_controller import make
from tests.builders.notices import open_journal

MANY = 60


def opened(incidents: list[Incident]) -> list[IncidentChange]:
    return [IncidentChange(before=None, after=each) for each in incidents]


def in_pieces(
    directory: Path,
    size: int,
    between: Callable[[Controller, int], None] = lambda controller, number: None,
) -> tuple[Journal, int]:
    """All is told and decided, `size` at once; `between` is called wherever others have their turn. Returns
    how often that was."""
    directory.mkdir(exist_ok=True)
    journal, turns = open_journal(directory), 0

    async def go() -> None:
        nonlocal turns
        controller, incidents = make(journal, MANY, size)
        now = clock.monotonic()
        for pieces in (controller.news.report(opened(incidents), now), controller.decider.pieces(now)):
            for _ in pieces:
                turns += 1
                between(controller, turns)
        await controller.collector.close()

    asyncio.run(go())
    return journal, turns


def written(journal: Journal) -> tuple[object, ...]:
    """All that was decided, told and noted, in order; without ids and moments, which are new each time."""
    decisions = [(each.incident_id, each.verdict, each.by, each.action) for each in journal.decisions()]
    messages = [(each.incident_id, each.payload.get("what")) for each in journal.outbox.pending(10_000)]
    notes = [[text for _, text in journal.timeline(f"i{n}")] for n in range(MANY)]
    return sorted(decisions), sorted(messages, key=str), notes


def decided(journal: Journal) -> list[int]:
    """The incidents with a decision, one entry for each decision."""
    return sorted(int(each.incident_id[1:]) for each in journal.decisions())


@pytest.mark.parametrize("size", [7, 25])
def test_in_pieces_the_same_is_written_as_in_one(tmp_path: Path, size: int) -> None:
    whole, none = in_pieces(tmp_path / "whole", 10_000)
    parts, turns = in_pieces(tmp_path / "parts", size)
    assert none == 0
    assert turns >= 2 * (MANY // size - 1)
    assert written(parts) == written(whole)
    assert [each.incident_id for each in parts.outbox.pending(MANY)] == [f"i{n}" for n in range(MANY)]
    assert decided(parts) == list(range(MANY))


def test_whenever_others_have_their_turn_all_that_was_found_out_is_on_the_disk(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def look(controller: Controller, turn: int) -> None:
        on_disk = open_journal(tmp_path / "parts")  # as another process sees it
        told = [each.incident_id for each in on_disk.outbox.pending(1000)]
        saved = {each.id for each in on_disk.load_open_incidents()}
        decided = [each.incident_id for each in on_disk.decisions()]
        known = [each for each, of in controller.decider._earlier.items() if of]
        assert set(told) == saved
        assert sorted(decided) == sorted(known)
        assert len(decided) == len(set(decided))
        assert not decided or len(saved) == MANY  # nothing is decided before it is told
        seen.append((len(saved), len(decided)))
        on_disk.close()

    in_pieces(tmp_path / "parts", 20, look)
    assert seen == [(20, 0), (40, 0), (60, 20), (60, 40)]


def test_a_pause_between_two_pieces_holds_for_the_next_one(tmp_path: Path) -> None:
    def pause(controller: Controller, turn: int) -> None:
        if turn == 3:
            controller.journal.pause("the fabric is being looked at", "root", clock.wall())

    journal, _ = in_pieces(tmp_path, 20, pause)
    by = {int(each.incident_id[1:]): each.by for each in journal.decisions()}
    assert len(by) == MANY
    assert {by[n] for n in range(20, MANY)} == {"paused"}
    assert "paused" not in {by[n] for n in range(20)}


@pytest.mark.parametrize("turn", [1, 3])
def test_an_incident_that_ends_between_two_pieces_stays_ended(tmp_path: Path, turn: int) -> None:
    """Its action has ended it: neither is it written as firing once more, nor decided about."""

    def end(controller: Controller, now: int) -> None:
        if now == turn:
            controller.news.close_incident(controller.judge.incidents[-1], "its action has ended")

    journal, _ = in_pieces(tmp_path, 20, end)
    last = journal.incident(f"i{MANY - 1}")
    assert last is not None and last.state is IncidentState.RESOLVED
    assert len(journal.load_open_incidents()) == MANY - 1
    assert decided(journal) == list(range(MANY - 1))


def test_a_tick_that_is_stopped_between_two_pieces_is_gone_on_with_in_the_next_life(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(controller: Controller, turn: int) -> None:
        if turn == 3:
            raise Stopped

    with pytest.raises(Stopped):
        in_pieces(tmp_path, 20, stop)
    journal = open_journal(tmp_path)
    assert len(journal.decisions()) == 20

    async def go() -> None:
        controller, _ = make(journal, MANY)
        assert len(journal.load_open_incidents()) == MANY
        for _ in controller.decider.pieces(clock.monotonic()):
            pass
        await controller.collector.close()

    asyncio.run(go())
    assert decided(journal) == list(range(MANY))


def test_the_service_gives_others_a_turn_between_two_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    seen: set[int] = set()

    async def go() -> None:
        controller, incidents = make(journal, MANY, 10)
        stop = asyncio.Event()
        monkeypatch.setattr(controller.judge, "conclude", lambda *_: opened(incidents))
        ticks = asyncio.create_task(app._tick_until_stopped(controller, stop))
        while len(journal.decisions()) < MANY and not ticks.done():
            seen.add(len(journal.decisions()))
            await asyncio.sleep(0)
        stop.set()
        ticks.cancel()
        await asyncio.gather(ticks, return_exceptions=True)
        await controller.collector.close()

    asyncio.run(asyncio.wait_for(go(), 60))
    assert {10, 20, 30, 40, 50} <= seen


def test_what_failed_to_be_written_together_comes_before_what_failed_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The eleventh fails by itself, so that the rest waits; then the disk does not take the first ten either."""
    journal = open_journal(tmp_path)

    async def go() -> None:
        controller, incidents = make(journal, MANY)
        save = journal.save_incident

        def save_most(incident: Incident) -> None:
            if incident.id == "i10":
                raise JournalError("the disk is full")
            save(incident)

        def full(*_: object) -> None:
            raise JournalError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(journal, "save_incident", save_most)
            patched.setattr(journal._database, "_write_waiting", full)
            for _ in controller.news.report(opened(incidents), clock.monotonic()):
                pass
        assert journal.load_open_incidents() == []
        assert controller.journal_error == "the disk is full"
        controller.writer.catch_up()
        assert controller.journal_error is None
        assert [each.incident_id for each in journal.outbox.pending(1000)] == [f"i{n}" for n in range(MANY)]
        assert len(journal.load_open_incidents()) == MANY
        assert all(len(journal.timeline(f"i{n}")) == 1 for n in range(MANY))
        await controller.collector.close()

    asyncio.run(go())


def test_the_notifier_of_a_controller_knows_the_jobs_of_the_newest_listing(tmp_path: Path) -> None:
    controller, _ = make(open_journal(tmp_path), 2)
    listed = [controller.notifier.sources.job_of(job_id) for job_id in ("0", "1", "2")]
    assert [job and job.job_id for job in listed] == ["0", "1", None]
