"""slurm_watchdog.analysis.lost_time: every second of a run is counted once, under the cause that took it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.analysis.lost_time import report
from slurm_watchdog.model.run_record import JobTime, RunRecord, Spell, merged

T = 1_700_000_000.0
H = 3600.0


def run(number: int, began_h: float, ended_h: float | None, **changes: Any) -> RunRecord:
    """A run on 10 nodes with a step of 10 s; its first new step came after a quarter of an hour."""
    given_: dict[str, Any] = {
        "job_id": "7", "restarts": number, "began_at": T + began_h * H, "nodes": 10, "state": "COMPLETED",
        "ended_at": None if ended_h is None else T + ended_h * H, "seen_at": T + (ended_h or 100.0) * H,
        "first_rise_at": T + (began_h + 0.25) * H, "step_s": 10.0, "user": "ann", "uid": 1000,
    }  # fmt: skip
    return RunRecord(**{**given_, **changes})


def hang(began_h: float, ended_h: float, restarts: int = 0, **changes: Any) -> Spell:
    given_: dict[str, Any] = {"job_id": "7", "restarts": restarts, "kind": "collective_hang", "nodes": ("n3",)}
    return Spell(**{**given_, "began_at": T + began_h * H, "ended_at": T + ended_h * H, "acted": True, **changes})


def hours(job: JobTime) -> dict[str, float]:
    return {cause: round(each, 6) for cause, each in job.lost_h}


CHRONICLE = (
    # 2.25 h of steps from 1000 on, then 7.5 h in which nobody noticed that rank 3 hung.
    run(0, 0.0, 10.0, state="RUNNING", first_step=1000, last_step=1810, last_rise_at=T + 2.5 * H),
    # From the checkpoint of step 1630 on: half an hour of steps is made again.
    run(1, 10.5, 13.0, first_step=1630, last_step=2440, last_rise_at=T + 13.0 * H),
)


def test_a_hang_that_nobody_noticed_a_restart_and_steps_made_again_are_each_counted() -> None:
    (job,) = report(CHRONICLE, [hang(2.5, 10.0)], T, T + 100 * H).jobs
    assert hours(job) == {"collective_hang": 75.0, "recomputed steps": 5.0, "first start": 2.5, "restart": 2.5}
    assert (job.allocated_h, job.measured_h) == (125.0, 125.0)
    assert job.effective_h == pytest.approx((810 - 180 + 810) * 10.0 / H * 10)
    assert job.share == pytest.approx(0.32)
    assert (job.queued_h, job.failures, job.runs) == (0.5, 1, 2)


def test_what_came_before_an_incident_was_reported_was_spent_waiting_to_be_noticed() -> None:
    """Last step at 2.5 h, reported at 4 h, ended at 10 h: of 75 node-hours 15 passed before anybody could know."""
    found = report(CHRONICLE, [hang(2.6, 10.0, fired_at=T + 4.0 * H)], T, T + 100 * H)
    assert hours(found.jobs[0])["collective_hang"] == 75.0
    assert found.to_be_noticed_h == found.jobs[0].to_be_noticed_h == (("collective_hang", pytest.approx(15.0)),)
    early = report(CHRONICLE, [hang(2.6, 10.0, fired_at=T + 2.0 * H)], T, T + 100 * H)
    assert early.to_be_noticed_h == ()


def test_of_a_pause_inside_of_a_run_what_came_before_its_report_waited_too() -> None:
    whole = run(0, 0.0, 10.0, first_step=0, last_step=3060, last_rise_at=T + 10.0 * H)
    (job,) = report([whole], [hang(5.0, 5.5, fired_at=T + 5.2 * H)], T, T + 100 * H).jobs
    assert (hours(job)["collective_hang"], job.to_be_noticed_h) == (5.0, (("collective_hang", pytest.approx(2.0)),))


def test_a_wait_without_an_incident_goes_by_the_end_of_the_run() -> None:
    failed = run(0, 0.0, 10.0, state="NODE_FAIL", first_step=1000, last_step=1810, last_rise_at=T + 2.5 * H)
    found = report([failed], [], T, T + 100 * H)
    assert hours(found.jobs[0])["ended NODE_FAIL"] == 75.0
    assert (found.failures, found.node_hours_between_failures) == (1, 100.0)


def test_a_run_that_ends_with_its_last_step_waited_for_nothing() -> None:
    (job,) = report(CHRONICLE[1:], [], T, T + 100 * H).jobs
    assert hours(job) == {"restart": 2.5}


def test_what_a_restart_in_its_allocation_cost_is_of_the_same_run() -> None:
    whole = run(0, 0.0, 10.0, first_step=0, last_step=3060, last_rise_at=T + 10.0 * H)
    (job,) = report([whole], [hang(5.0, 5.5, recomputed_s=0.5 * H)], T, T + 100 * H).jobs
    assert hours(job) == {
        "recomputed steps": 5.0, "collective_hang": 5.0, "first start": 2.5, "other": pytest.approx(2.5),
    }  # fmt: skip


def test_a_run_whose_steps_cannot_be_read_is_in_no_share() -> None:
    unread = run(0, 0.0, 10.0, first_rise_at=None, step_s=None)
    found = report([unread], [], T, T + 100 * H)
    assert (found.share, found.measured_h, dict(found.lost_h)) == (None, 0.0, {"not measured": 100.0})


def test_a_run_that_failed_before_its_first_step_is_lost_as_a_whole() -> None:
    failed = run(0, 0.0, 1.0, state="FAILED", first_rise_at=None, step_s=None)
    (job,) = report([failed], [hang(0.9, 1.0, kind="log_error", acted=False)], T, T + 100 * H).jobs
    assert (hours(job), job.share, job.failures) == ({"log_error": 10.0}, 0.0, 1)


def test_of_a_run_that_began_before_only_the_part_inside_counts() -> None:
    (job,) = report(CHRONICLE[:1], [hang(2.5, 10.0)], T + 5 * H, T + 100 * H).jobs
    assert (job.allocated_h, job.failures, hours(job)) == (50.0, 1, {"collective_hang": 50.0})
    assert report(CHRONICLE, [], T + 14 * H, T + 100 * H).jobs == ()


def test_of_a_run_of_four_weeks_the_hang_is_counted_in_the_week_in_which_it_was() -> None:
    """It was spread over all of them: a week of training lost a fourth of what another had lost."""
    week = 168.0
    long = run(
        0, 0.0, 4 * week, first_step=0, last_step=230_000, last_rise_at=T + (4 * week - 20) * H, state="NODE_FAIL"
    )
    hangs = [hang(4 * week - 20, 4 * week, acted=False), hang(week, week + 5)]
    weeks = [report([long], hangs, T + n * week * H, T + (n + 1) * week * H) for n in range(4)]
    lost = [hours(each.jobs[0]).get("collective_hang", 0.0) for each in weeks]
    assert lost == [0.0, 50.0, 0.0, 200.0]
    assert [hours(each.jobs[0]).get("first start", 0.0) for each in weeks] == [2.5, 0.0, 0.0, 0.0]
    assert [each.failures for each in weeks] == [0, 0, 0, 1]


def test_what_two_incidents_at_once_took_is_lost_once() -> None:
    whole = run(0, 0.0, 10.0, first_step=0, last_step=2340, last_rise_at=T + 10.0 * H)
    at_once = [hang(5.0, 6.0), hang(5.5, 6.5, kind="filesystem_stall")]
    (job,) = report([whole], at_once, T, T + 100 * H).jobs
    assert hours(job) == {"collective_hang": 10.0, "filesystem_stall": 5.0, "first start": 2.5, "other": 17.5}


def test_what_was_before_a_controller_watched_a_run_is_not_measured() -> None:
    late = run(
        0,
        0.0,
        10.0,
        watched_from=T + 8.0 * H,
        first_rise_at=T + 8.0 * H,
        first_step=5000,
        last_step=5720,
        last_rise_at=T + 10.0 * H,
    )
    found = report([late], [], T, T + 100 * H)
    assert (hours(found.jobs[0]), found.share) == ({"not measured": 80.0}, 1.0)


def test_nodes_and_kinds_are_counted_once_an_incident() -> None:
    found = report(CHRONICLE, [hang(2.5, 10.0), hang(12.0, 12.1, restarts=1, nodes=("n3", "n4"))], T, T + 100 * H)
    assert found.nodes == (("n3", 2), ("n4", 1))
    assert found.incidents == (("collective_hang", 2),)


@pytest.mark.parametrize("state", ["REQUEUED", "FAILED"])
def test_a_run_that_ended_for_maintenance_or_since_a_person_asked_is_no_failure(state: str) -> None:
    runs = [run(0, 0.0, 10.0, job_id=f"{n}", state=state, first_step=0, last_step=3510, last_rise_at=T + 10 * H)
            for n in range(50)]  # fmt: skip
    asked = [hang(9.9, 10.1, job_id=each.job_id, kind="ends_soon", planned=True) for each in runs]
    found = report(runs, asked, T, T + 100 * H)
    assert (found.failures, found.node_hours_between_failures) == (0, None)
    assert (found.savings.compared, found.savings.unknown, found.nodes) == (0, 0, ())


def test_a_failure_long_after_a_person_had_the_job_save_is_one_and_so_is_a_hang_that_was_acted_on() -> None:
    saved = hang(1.0, 1.1, kind="operator_restart", planned=True)
    assert report([run(0, 0.0, 10.0, state="NODE_FAIL")], [saved], T, T + 100 * H).failures == 1
    both = [hang(9.0, 10.0), hang(9.5, 10.1, kind="ends_soon", planned=True)]
    assert report([run(0, 0.0, 10.0, state="REQUEUED")], both, T, T + 100 * H).failures == 1


seconds = st.floats(0.0, 50 * H)
steps = st.integers(0, 5000)
ROWS = st.lists(st.tuples(seconds, seconds, seconds, seconds, steps, steps, st.booleans()), max_size=5)
INCIDENTS = st.lists(st.tuples(seconds, seconds, st.integers(0, 4)), max_size=5)


def known(rows: list[Any], incidents: list[Any]) -> tuple[list[RunRecord], list[Spell]]:
    """Runs and incidents of any dates, also such that a clock that was set back has made."""
    runs = [
        run(
            number, 0.0, 0.0, began_at=T + began, ended_at=T + began + took if over else None, seen_at=T + began + took,
            first_rise_at=T + rose, last_rise_at=T + later, first_step=first, last_step=last,
            step_s=10.0 if first % 2 else None,
        )
        for number, (began, took, rose, later, first, last, over) in enumerate(rows)
    ]  # fmt: skip
    spells = [
        hang(began / H, (began + took) / H, restarts, fired_at=T + began + took / 2, recomputed_s=took % 1800)
        for began, took, restarts in incidents
    ]
    return runs, spells


@given(ROWS, INCIDENTS)
def test_whatever_is_known_of_runs_each_second_is_counted_once(rows: list[Any], incidents: list[Any]) -> None:
    for job in report(*known(rows, incidents), T, T + 200 * H).jobs:
        lost, before = dict(job.lost_h), dict(job.to_be_noticed_h)
        assert all(0 < each <= lost[kind] + 1e-9 for kind, each in before.items())
        assert job.effective_h >= 0 and all(each > 0 for _, each in job.lost_h)
        assert job.effective_h + sum(each for _, each in job.lost_h) == pytest.approx(job.allocated_h, abs=1e-6)


@given(ROWS, INCIDENTS, st.lists(seconds, max_size=4))
def test_the_reports_of_the_days_are_together_that_of_the_whole_time(
    rows: list[Any], incidents: list[Any], cuts: list[float]
) -> None:
    runs, spells = known(rows, incidents)
    dates = [T, *(T + each for each in sorted(cuts)), T + 200 * H]
    whole, *days = (report(runs, spells, since, until) for since, until in ((T, T + 200 * H), *pairwise(dates)))
    for name in ("allocated_h", "measured_h", "effective_h"):
        assert sum(getattr(each, name) for each in days) == pytest.approx(getattr(whole, name), abs=1e-6)
    for name in ("lost_h", "to_be_noticed_h"):
        sums: Counter[str] = Counter()
        for each in days:
            sums.update(dict(getattr(each, name)))
        found = dict(getattr(whole, name))
        assert all(sums[cause] == pytest.approx(found.get(cause, 0.0), abs=1e-6) for cause in {*sums, *found})


def test_a_controller_that_was_started_in_between_keeps_what_the_one_before_knew() -> None:
    first = run(0, 0.0, None, first_step=10, last_step=500, last_rise_at=T + 3 * H, gpus=8)
    later = run(0, 0.0, 9.0, first_step=600, last_step=900, first_rise_at=T + 4 * H, last_rise_at=T + 9 * H)
    both = merged(first, later)
    assert (both.first_step, both.last_step, both.first_rise_at, both.ended_at, both.gpus) == (
        10, 900, T + 0.25 * H, T + 9 * H, 8,
    )  # fmt: skip
    over = merged(first, run(0, 0.0, 9.0, first_rise_at=None, step_s=None))
    assert (over.last_step, over.step_s, over.last_rise_at) == (500, 10.0, T + 3 * H)
