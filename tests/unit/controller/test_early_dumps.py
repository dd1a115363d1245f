"""Dumps that are taken because a step is late by its own measure: what is learnt of a run's pace, how often they are
asked for, how soon agents hear of it, and what is kept of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.evidence.requests import EARLY_DUMPS_AN_HOUR, HeldAnswers, early_budget, is_due
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.counter_clock import PAUSE_KEPT_S, SETTLED_AFTER, Paces
from slurm_watchdog.controller.state.run import Run, new_run
from slurm_watchdog.controller.state.run_updates import note_early_dump, note_event, note_on_disk, note_snapshot
from slurm_watchdog.controller.state.run_view import job_view
from slurm_watchdog.controller.state.training_steps import ProcessRates
from slurm_watchdog.model.cluster_view import JobView, StillRow
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, LogFile
from slurm_watchdog.model.protocol import CollectEvidence, CommandResult, DumpStacks, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmView
from slurm_watchdog.wire.http_client import Connection
from tests.builders.identity_door import body_of, listening
from tests.builders.views import BARRIER, COMPUTE, LOADER, process, slurm_job, stack

LOG = "/logs/7.out"
STILL = tuple(stack(rank, BARRIER) for rank in range(4))


def said(step: int | None = None, **changes: object) -> Event:
    given = {
        "kind": EventKind.PROGRESS,
        "job_id": "7",
        "age_s": 0.0,
        "source": LOG,
        "step": step,
        "pattern": "key_value",
    }
    return Event(**{**given, **changes})  # type: ignore[arg-type]


def trained(steps: int = 60, every_s: float = 5.0) -> Run:
    """A run that began at 0 and made a step every 5 s."""
    run = new_run(slurm_job(start_at=None), 0.0, None, None, LeftOut())
    for step in range(1, steps + 1):
        note_event(run, "n1", said(step), every_s * step)
    return run


def seen(run: Run, now: float) -> JobView:
    state = ClusterState(silent_after_s=600, report_lifetime_s=60)
    return job_view(run, run.job, now, state.nodes, state.gpus, ())


def row_of(run: Run, now: float = 400.0) -> StillRow:
    row = seen(run, now).row
    assert row is not None
    return row


def test_the_pace_of_a_run_knows_neither_what_the_log_announces_nor_what_a_checkpoint_took() -> None:
    run = trained()
    note_event(run, "n1", said(kind=EventKind.PHASE, phase="evaluating"), 301.0)
    note_event(run, "n1", said(61), 600.0)
    note_on_disk(run, "n1", Checkpoint(job_id="7", directory="/c", layout="x", step=50), 601.0)
    note_on_disk(run, "n1", Checkpoint(job_id="7", directory="/c", layout="x", step=60), 640.0)
    note_event(run, "n1", said(62), 645.0)
    progress = seen(run, 646.0).progress
    assert progress is not None
    assert (set(progress.paces_s), progress.longest_pace_s) == ({5.0}, 5.0)
    assert max(progress.intervals_s) == 45.0, "the limit is learnt from what no line announces as well"
    assert seen(run, 646.0).saved_age_s == 6.0


def test_a_run_that_saves_between_any_two_looks_has_a_pace_all_the_same() -> None:
    """Lines of one look have one date: their order in the file says which step was made after which save."""
    for last_is_a_save in (True, False):
        run = new_run(slurm_job(start_at=None), 0.0, None, None, LeftOut())
        for look in range(1, 31):
            saves = (
                said(10 * look, kind=EventKind.PHASE, phase="checkpointing"),
                said(10 * look, kind=EventKind.CHECKPOINT),
            )
            steps = (said(10 * look - 1), said(10 * look))
            after = () if last_is_a_save else (said(10 * look + 1),)
            for event in (*steps, *saves, *after):
                note_event(run, "n1", event, 5.0 * look)
        progress = seen(run, 151.0).progress
        assert progress is not None and len(progress.paces_s) >= 20
        assert (max(progress.paces_s), progress.longest_pace_s, progress.phase) == (5.0, 5.0, None)


def test_a_long_save_whose_end_is_read_with_the_step_after_it_is_no_pace() -> None:
    run, now = trained(), 300.0
    for step in (60, 61, 62):
        note_event(run, "n1", said(step, kind=EventKind.PHASE, phase="checkpointing"), now + 1.0)
        now += 130.0
        for event in (said(step, kind=EventKind.CHECKPOINT), said(step + 1)):
            note_event(run, "n1", event, now)
    progress = seen(run, now).progress
    assert progress is not None and (progress.longest_pace_s, max(progress.paces_s)) == (5.0, 5.0)


def test_a_pause_that_ended_by_itself_is_remembered_for_a_day_also_if_it_was_taken_for_a_hang() -> None:
    paces = Paces()
    for number in range(SETTLED_AFTER):
        paces.add(300.0, float(number), troubled=False)  # the first steps compile
    for number in range(5):
        paces.add(5.0, 10.0 * number, troubled=False)
    paces.add(40.0, 100.0, troubled=True)
    assert (paces.longest_s(100.0), paces.recent_s()) == (40.0, (5.0,) * 5)
    assert paces.longest_s(100.0 + PAUSE_KEPT_S) == 40.0
    assert paces.longest_s(101.0 + PAUSE_KEPT_S) == 0.0


def test_it_is_known_when_the_log_of_the_steps_was_read_last() -> None:
    run = trained()
    assert (progress := seen(run, 310.0).progress) is not None and progress.read_age_s is None
    state = ClusterState(silent_after_s=600, report_lifetime_s=60)
    state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=()), 0.0)
    for number, log in enumerate((LogFile(job_id="7", path=LOG), LogFile(job_id="7", path=LOG, lag_bytes=5))):
        events = (said(1, age_s=2.0), said(2, age_s=1.0)) if number == 0 else ()
        report = Report(
            node="n1", boot_id="b", agent_id="a", sequence=number, processes=(process(0),), events=events, logs=(log,)
        )
        state.apply_report(report, 10.0 + 5.0 * number)
        view = state.job_view("7", 17.0)
        assert view is not None and view.progress is not None
        assert view.progress.read_age_s == (7.0 if number == 0 else None)


def test_a_row_of_dumps_grows_until_somebody_moves_or_is_not_seen_and_a_step_ends_it() -> None:
    run = trained()
    for at in (306.0, 308.0, 310.0, 314.0):
        note_early_dump(run, STILL, (), at, at - 1.0)
    row = row_of(run)
    assert (row.dumps, row.over, [dump.age_s for dump in row.snapshots]) == (4, False, [94.0, 90.0, 86.0])
    assert seen(run, 400.0).snapshots == (), "what the limit judges is not fed with them"
    note_snapshot(run, STILL, (), 330.0)
    assert (row_of(run).dumps, row_of(run).over) == (5, False)
    note_snapshot(run, (*STILL[:3], stack(3, COMPUTE)), (), 340.0)
    note_snapshot(run, STILL, (), 350.0)
    assert row_of(run).over, "what has moved since proves nothing any more"
    note_event(run, "n1", said(61), 360.0)
    assert seen(run, 400.0).row is None


def test_a_dump_that_lacks_somebody_ends_its_row() -> None:
    for stacks, silent in (
        ((*STILL[:3], stack(3, (), error="EPERM")), ()),
        (STILL[:3], ("n2",)),
        ((), ()),
    ):
        run = trained()
        note_early_dump(run, stacks, silent, 306.0, 305.0)
        assert row_of(run).over
    run = trained()
    note_early_dump(run, STILL, (), 306.0, 305.0)
    note_early_dump(run, STILL[:3], (), 308.0, 307.0)
    assert row_of(run).over


def test_a_dump_that_was_asked_for_before_the_newest_step_is_dropped() -> None:
    run = trained()
    note_early_dump(run, STILL, (), 302.0, 299.0)
    assert seen(run, 303.0).row is None


def test_a_run_has_its_dumps_of_an_hour_and_then_one_at_a_time() -> None:
    budget = early_budget()
    assert all(budget.acquire("7.0", 1.0 * n) for n in range(EARLY_DUMPS_AN_HOUR))
    assert not budget.acquire("7.0", 100.0)
    assert budget.acquire("8.0", 100.0)
    assert budget.acquire("7.0", 200.0)
    assert not budget.acquire("7.0", 209.0)


def test_who_works_is_known_from_one_report_to_the_next() -> None:
    rates = ProcessRates(0.0, 10.0, 1000)

    def worked(now: float, cpu_s: float, io_bytes: int) -> float | None:
        rates.update(process(0, cpu_s=cpu_s, io_bytes=io_bytes), now)
        return rates.worked_at

    looks: Sequence[tuple[float, float, int, float]] = (
        (0.0, 10.0, 1000, 0.0),  # what it did before is not known
        (5.0, 10.1, 1000, 0.0),
        (6.0, 11.0, 1000, 0.0),  # too close to tell
        (10.0, 11.0, 1000, 10.0),
        (15.0, 11.0, 10**6, 15.0),
        (20.0, 11.0, 10**6, 15.0),
    )
    for now, cpu_s, io_bytes, expected in looks:
        assert worked(now, cpu_s, io_bytes) == expected


def test_a_step_is_due_once_most_came_after_less_and_not_for_ever() -> None:
    run = trained()
    assert [is_due(run, now, 5.0) for now in (304.0, 305.0, 400.0, 425.0)] == [False, True, True, False]
    assert [is_due(run, now, 13.0) for now in (311.0, 311.8)] == [False, True], "nobody can say so before"
    note_event(run, "n1", said(kind=EventKind.PHASE, phase="evaluating"), 301.0)
    assert not is_due(run, 305.0, 5.0)
    assert not is_due(trained(steps=15), 81.0, 5.0), "too little is known of its pace"


def test_the_answer_to_a_node_whose_job_is_due_waits_for_a_question_and_not_long() -> None:
    async def story() -> None:
        state, commands = ClusterState(silent_after_s=600, report_lifetime_s=60), CommandQueue()
        nobody = frozenset[str]().__contains__
        state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=()), 0.0)
        for step in range(1, 61):
            mine = (process(0),)
            report = Report(node="n1", boot_id="b", agent_id="a", sequence=step, processes=mine, events=(said(step),))
            state.apply_report(report, 5.0 * step)
        held = HeldAnswers(state, commands, lambda node: 1.05, nobody)
        assert held.coming("n1", 302.0) is None
        acted_on = HeldAnswers(state, commands, lambda node: 1.05, {"7"}.__contains__).coming("n1", 302.0)
        assert acted_on is not None
        assert await acted_on == ()
        assert held.coming("n9", 306.0) is None
        assert HeldAnswers(state, commands, lambda node: 1.0, nobody).coming("n1", 306.0) is None, (
            "its next report is there as soon"
        )
        coming = held.coming("n1", 306.0)
        assert coming is not None
        assert await coming == ()
        coming = HeldAnswers(state, commands, lambda node: 6.0, nobody).coming("n1", 306.0)
        assert coming is not None
        waits = asyncio.ensure_future(coming)
        await asyncio.sleep(0)
        asked = asyncio.ensure_future(commands.ask("n1", DumpStacks(id="c", job_id="7", restarts=0), 600.0))
        assert [each.id for each in await asyncio.wait_for(waits, 10)] == ["c"]
        assert held.coming("n1", 306.0) is None, "its next report has the stacks, and waits behind this answer"
        commands.resolve(CommandResult(command_id="c", ok=True))
        coming = held.coming("n1", 306.0)
        assert coming is not None
        assert await coming == ()
        assert (await asked).ok

    asyncio.run(story())


def test_an_answer_is_not_held_for_longer_than_evidence_takes_to_come() -> None:
    async def story() -> None:
        now = [100.0]
        commands = CommandQueue(lambda: now[0])
        asked = asyncio.ensure_future(
            commands.ask("n1", CollectEvidence(id="e", job_id="7", restarts=0, dumps=3, apart_s=2.5), 600.0)
        )
        await asyncio.sleep(0)
        assert commands.silent_s("n1") == float("inf")
        commands.pop("n1")
        now[0] = 103.0
        assert (commands.silent_s("n1"), commands.silent_s("n2")) == (2.0, float("inf"))
        commands.resolve(CommandResult(command_id="e", ok=True))
        assert commands.silent_s("n1") == float("inf")
        assert (await asked).ok

    asyncio.run(story())


def test_who_was_asked_a_moment_ago_is_asked_again_without_a_reports_interval() -> None:
    async def story() -> None:
        now = [100.0]
        state, commands = ClusterState(silent_after_s=600, report_lifetime_s=60), CommandQueue(lambda: now[0])
        held = HeldAnswers(state, commands, lambda node: 600.0, frozenset[str]().__contains__)
        assert held.coming("n1", now[0]) is None
        first = asyncio.ensure_future(commands.ask("n1", DumpStacks(id="a", job_id="7", restarts=0), 600.0))
        await asyncio.sleep(0)
        commands.pop("n1")
        commands.resolve(CommandResult(command_id="a", ok=True))
        assert (await first).ok
        assert held.coming("n2", now[0]) is None
        coming = held.coming("n1", now[0])
        assert coming is not None
        waits = asyncio.ensure_future(coming)
        await asyncio.sleep(0)
        again = asyncio.ensure_future(commands.ask("n1", DumpStacks(id="b", job_id="7", restarts=0), 600.0))
        assert [each.id for each in await asyncio.wait_for(waits, 10)] == ["b"]
        commands.resolve(CommandResult(command_id="b", ok=True))
        assert (await again).ok
        now[0] += 11.0
        assert held.coming("n1", now[0]) is None

    asyncio.run(story())


def test_a_job_that_has_just_lost_a_rank_is_asked_without_a_reports_interval() -> None:
    async def story() -> None:
        state, commands = ClusterState(silent_after_s=600, report_lifetime_s=60), CommandQueue()
        state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=()), 0.0)
        for sequence, mine in enumerate(((process(0), process(1)), (process(0),)), 1):
            report = Report(node="n1", boot_id="b", agent_id="a", sequence=sequence, processes=mine)
            state.apply_report(report, 5.0 * sequence)
        held = HeldAnswers(state, commands, lambda node: 1.05, frozenset[str]().__contains__)
        for node in ("n1", "n2"):
            coming = held.coming(node, 11.0)
            assert coming is not None
            assert await coming == ()
        assert held.coming("n1", 26.0) is None

    asyncio.run(story())


def test_a_rank_is_lost_when_it_dies_and_not_when_its_parent_takes_note() -> None:
    async def story() -> None:
        state, commands = ClusterState(silent_after_s=600, report_lifetime_s=60), CommandQueue()
        state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=()), 0.0)
        held = HeldAnswers(state, commands, lambda node: 1.05, frozenset[str]().__contains__)
        alive, dead = (process(0), process(1)), (process(0), process(1, state="Z"))
        looks = ((5.0, alive, False), (10.0, dead, True), (30.0, dead, False), (35.0, alive[:1], False))
        for sequence, (at, mine, is_urgent) in enumerate(looks, 1):
            report = Report(node="n1", boot_id="b", agent_id="a", sequence=sequence, processes=mine)
            state.apply_report(report, at)
            coming = held.coming("n1", at + 1.0)
            assert (coming is not None) is is_urgent, at
            assert coming is None or await coming == ()

    asyncio.run(story())


def test_an_answer_that_waits_has_what_is_asked_meanwhile_in_it() -> None:
    async def asked() -> tuple[DumpStacks, ...]:
        await asyncio.sleep(0)
        return (DumpStacks(id="c", job_id="7", restarts=0),)

    with listening(coming=lambda node: asked() if node == "n1" else None) as port:
        connection = Connection(f"http://127.0.0.1:{port.number}", 1 << 20)
        for node, expected in (("n1", ["c"]), ("n2", [])):
            answer = connection.post("/v1/report", body_of(node), {"Content-Type": "application/json"}, 5.0, 15.0)
            reply = msgspec.json.decode(answer.body, type=Reply)
            assert [each.id for each in reply.commands] == expected
        late = body_of("n1").replace(b"{", b'{"age_s":20.5,', 1)
        answer = connection.post("/v1/report", late, {"Content-Type": "application/json"}, 5.0, 15.0)
        assert not msgspec.json.decode(answer.body, type=Reply).commands, "reports wait in the spool behind this one"
        connection.close()
        assert [each.node for each in port.reports] == ["n1", "n2", "n1"]


def test_dumps_with_other_frames_are_not_alike() -> None:
    run = trained()
    note_early_dump(run, STILL, (), 306.0, 305.0)
    moved: tuple[ProcessStack, ...] = (*STILL[:3], stack(3, LOADER))
    note_early_dump(run, moved, (), 308.0, 307.0)
    assert row_of(run).over
