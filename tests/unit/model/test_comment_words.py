"""Limits of `run` in a job's comment."""

from __future__ import annotations

import pytest

from slurm_watchdog.model.slurm import run_limits


@pytest.mark.parametrize(
    ("comment", "limits"),
    [
        ("watchdog: max_restarts=5,spares=1", {"max_restarts": 5, "spares": 1}),
        ("project 7; WATCHDOG=stall_after=20m, max-restarts = 0; spares=9", {"max_restarts": 0}),
        ("max_restarts=5", {}),
        ("watchdog: off", {}),
        ("(null)\n", {}),
        ("", {}),
    ],
)
def test_limits_are_read_of_our_words_alone(comment: str, limits: dict[str, int]) -> None:
    assert run_limits(comment) == limits


@pytest.mark.parametrize("value", ["", "many", "-1", "1001", "\u0663", "1" * 5000])
def test_a_limit_that_is_no_number_is_refused_with_a_sentence(value: str) -> None:
    with pytest.raises(ValueError, match=r"spares: '.{0,40}' is not a number from 0 to 1000"):
        run_limits(f"watchdog: spares={value}")
