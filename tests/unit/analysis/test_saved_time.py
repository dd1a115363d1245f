"""slurm_watchdog.analysis.saved_time: a restart is compared with what came before it, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.analysis.report_sentences import saved
from slurm_watchdog.analysis.saved_time import Savings, savings
from slurm_watchdog.model.run_record import RunRecord, Spell

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
    assert saved(found).startswith("Actions saved 60.0 node-hours in 1 incident, against 6 h 30 min")


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
    assert "unknown" in saved(NEVER)


def test_the_same_job_by_name_counts_before_others_of_its_user() -> None:
    other = hang(20, 1.0, acted=False, name="debug")
    assert saved_by(LONG, other, OURS).usual_wait_s == 7.5 * H
    assert saved_by(other, OURS).usual_wait_s == 1.0 * H


def test_what_ended_outside_of_the_report_is_not_counted() -> None:
    assert saved_by(LONG, hang(20, 0.5, acted=True)) == Savings()
    assert saved(Savings()) == ""
