"""Dumps that are taken because a step is late by its own measure: what is learnt of a run's pace, how often they are
asked for, how soon agents hear of it, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.agent.sums import ProcessSums
from slurm_watchdog.controller.evidence.requests import EARLY_DUMPS_AN_HOUR, early_budget
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.counter_clock import PAUSE_KEPT_S, SETTLED_AFTER, Paces
from slurm_watchdog.controller.state.run import Run, new_run
from slurm_watchdog.controller.state.run_updates import note_early_dump, note_event, note_on_disk, note_snapshot
from slurm_watchdog.controller.state.run_view import Moment, job_view
from slurm_watchdog.model.cluster_view import JobView, StillRow
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, LogFile
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmView
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
    run = new_run(slurm_job(start_at=None), 0.0, None, None)
    for step in range(1, steps + 1):
        note_event(run, "n1", said(step), every_s * step)
    return run


def seen(run: Run, now: float) -> JobView:
    state = ClusterState(silent_after_s=600, report_lifetime_s=60)
    return job_view(run, run.job, Moment(now, now, now), state.nodes, ())


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
        run = new_run(slurm_job(start_at=None), 0.0, None, None)
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
    rates = ProcessSums(0.0, 10.0, 1000)

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


def test_dumps_with_other_frames_are_not_alike() -> None:
    run = trained()
    note_early_dump(run, STILL, (), 306.0, 305.0)
    moved: tuple[ProcessStack, ...] = (*STILL[:3], stack(3, LOADER))
    note_early_dump(run, moved, (), 308.0, 307.0)
    assert row_of(run).over
