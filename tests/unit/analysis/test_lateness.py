"""A step is late by what its own run has shown, if that is known."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.analysis.lateness import is_late, late_after_s
from tests.builders.proven_hangs import late
from tests.builders.views import job


def test_a_step_is_late_beyond_nearly_all_times_of_its_run_and_each_of_the_last_hundred() -> None:
    assert late_after_s(late(paces_s=(5.0,) * 100)) == pytest.approx(5.75)
    assert late_after_s(late(paces_s=(100.0,) * 100)) == pytest.approx(115.0)
    assert late_after_s(late(paces_s=(5.0,) * 199 + (40.0,))) == pytest.approx(44.0), "one of the last hundred"
    assert late_after_s(late(paces_s=(40.0,) + (5.0,) * 199)) == pytest.approx(5.75), "long ago, and alone"
    assert late_after_s(late(paces_s=(40.0,) * 4 + (5.0,) * 196)) == pytest.approx(46.0), "two of a hundred"
    assert late_after_s(late(paces_s=(0.1,) * 100)) == pytest.approx(0.85)


def test_of_a_run_that_nobody_knows_yet_no_step_is_late() -> None:
    assert late_after_s(None) is None
    assert late_after_s(late(paces_s=(5.0,) * 49)) is None
    assert late_after_s(late(paces_s=(5.0,) * 10, first_step=450)) == pytest.approx(5.75)
    assert late_after_s(late(paces_s=(5.0,) * 10, first_step=451)) is None
    assert late_after_s(late(paces_s=(5.0,) * 9, first_step=0)) is None
    assert late_after_s(late(paces_s=(5.0,) * 10, first_step=0, step_known=False)) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"age_s": 5.7}, False),
        ({"read_age_s": None}, False),
        ({"read_age_s": 8.5}, False),  # its node has not reported for long
        ({"age_s": 6.0, "read_age_s": 4.0}, False),  # a report is late
        ({"phase": "checkpointing"}, False),
        ({"shared": True}, False),
        ({"last_increase_age_s": None}, False),
    ],
)
def test_only_a_training_whose_log_was_read_since_is_late(changes: dict[str, Any], expected: bool) -> None:
    assert is_late(job(progress=late(**changes))) is expected


def test_a_run_whose_log_announces_something_is_not_late() -> None:
    assert not is_late(job(progress=late(), phase="evaluating"))
