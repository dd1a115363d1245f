"""slurm_watchdog.analysis.lost_time: a restart is compared with what came before it, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.lost_time import savings
from slurm_watchdog.model.run_record import RunRecord, Savings, Spell

H = 3600.0
NEVER = Savings(unknown=1)


def hang(
    at_h: float, wait_h: float, *, acted: bool, run_h: float | None = None, kind: str = "collective_hang", **of: Any
) -> tuple[RunRecord, Spell]:
    """A run on 10 nodes that hung `at_h` and was over when the hang was, or after `run_h` of it."""
    job_id, end = f"{at_h}", (at_h + (wait_h if run_h is None else run_h)) * H
    given: dict[str, Any] = {"user": "ann", "name": "gpt", "nodes": 10, "state": "RUNNING"}
    run = RunRecord(job_id=job_id, restarts=0, began_at=0.0, ended_at=end, seen_at=end, **{**given, **of})
    spell = Spell(job_id=job_id, restarts=0, kind=kind, began_at=at_h * H, ended_at=(at_h + wait_h) * H, acted=acted)
    return run, spell


def saved_by(*found: tuple[RunRecord, Spell]) -> Savings:
    return savings([run for run, _ in found], [spell for _, spell in found], 50 * H, 1000 * H)


OURS = hang(100, 0.5, acted=True)
LONG = hang(1, 7.5, acted=False)


def test_a_restart_saved_what_such_hangs_took_before_less_its_own_wait() -> None:
    found = saved_by(LONG, hang(20, 5.5, acted=False), hang(30, 6.5, acted=False), OURS)
    assert (found.saved_h, found.compared, found.usual_wait_s) == (pytest.approx(60.0), 1, 6.5 * H)


def test_a_restart_that_was_slower_than_people_saved_less_than_nothing() -> None:
    assert saved_by(hang(1, 0.25, acted=False), OURS).saved_h == pytest.approx(-2.5)


@pytest.mark.parametrize(
    "before",
    [
        hang(1, 7.5, acted=True),
        hang(1, 7.5, acted=False, kind="dead_rank"),
        hang(1, 7.5, acted=False, user="bob"),
        hang(1, 7.5, acted=False, run_h=90.0),
        hang(98, 7.5, acted=False),
    ],
    ids=["ours", "other kind", "other user", "passed by itself", "not over yet"],
)
def test_without_a_hang_that_compares_it_is_unknown(before: tuple[RunRecord, Spell]) -> None:
    assert saved_by(before, OURS) == NEVER


def test_the_same_job_by_name_counts_before_others_of_its_user() -> None:
    other = hang(20, 1.0, acted=False, name="debug")
    assert saved_by(LONG, other, OURS).usual_wait_s == 7.5 * H
    assert saved_by(other, OURS).usual_wait_s == 1.0 * H


def test_what_ended_outside_of_the_report_is_not_counted() -> None:
    assert saved_by(LONG, hang(20, 0.5, acted=True)) == Savings()


def observed(at_h: float, wait_h: float, **of: Any) -> tuple[RunRecord, Spell]:
    """A hang whose restart was decided after a minute, and only observed; the run never trained again."""
    run, spell = hang(at_h, wait_h, acted=False, last_rise_at=at_h * H, **of)
    return run, replace(spell, would_act_at=at_h * H + 60.0, stops_steps=True)


def test_a_decision_that_was_only_observed_would_have_saved_what_its_run_stood_still_after_it() -> None:
    run, spell = observed(100, 7.5)
    alike = run, replace(spell, kind="lingering_job", began_at=spell.began_at + 900, would_act_at=101 * H)
    found = saved_by((run, spell), alike, observed(200, 2.5, nodes=4))
    minute = 1 / 60
    assert found.would_save_h == pytest.approx(10 * (7.5 - minute) + 4 * (2.5 - minute))
    assert (found.observed, found.recovered, found.compared, found.unknown) == (2, 0, 0, 0)


def test_a_run_that_trained_again_by_itself_would_have_been_restarted_for_nothing() -> None:
    run, spell = observed(100, 7.5, run_h=90.0)
    found = saved_by((replace(run, last_rise_at=150 * H), spell))
    assert (found.would_save_h, found.observed, found.recovered) == (0.0, 0, 1)
    # It hung again, and that was decided, too: what stood still after the last step counts.
    again = replace(spell, began_at=185 * H, ended_at=190 * H, would_act_at=186 * H)
    found = saved_by((replace(run, last_rise_at=185 * H), spell), (run, again))
    assert (found.would_save_h, found.observed, found.recovered) == (pytest.approx(40.0), 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"would_act_at": None},
        {"stops_steps": False},
        {"planned": True},
        {"acted": True},
        {"restarts": None},
    ],
    ids=["nothing was decided", "it trained, slowly", "maintenance", "an action of ours ended it", "of which run"],
)
def test_what_no_restart_would_have_shortened_saves_nothing(change: dict[str, Any]) -> None:
    run, spell = observed(100, 7.5)
    found = saved_by((run, replace(spell, **change)))
    assert (found.would_save_h, found.observed) == (0.0, 0)


def test_a_run_that_still_stands_is_not_counted_yet() -> None:
    run, spell = observed(100, 7.5)
    found = saved_by((replace(run, ended_at=None), spell))
    assert (found.would_save_h, found.observed) == (0.0, 0)
