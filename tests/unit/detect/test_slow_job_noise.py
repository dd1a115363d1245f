"""slow_job on what healthy jobs do: no kind of noise is a slow-down. `make bench ARGS=steps` has a thousand hours of each."""

from __future__ import annotations

import pytest

from slurm_watchdog.detect.slow_job import SlowJob
from tests.builders.step_noise import KINDS, first_alarm, steps_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_slow_job_says_nothing_of_a_healthy_job_whatever_its_noise(kind: str, seed: int) -> None:
    assert first_alarm(steps_of(kind, seed, hours=8.0), 23, SlowJob()) is None


@pytest.mark.parametrize(("step_s", "quantum_s"), [(1.49, 1.0), (10.5, 1.0), (1.05, 0.1)])
def test_slow_job_of_figures_that_the_log_rounds_does_not_take_the_last_digit_for_a_change(
    step_s: float, quantum_s: float
) -> None:
    steps = steps_of("day_3_percent", 1, 8.0, step_s, quantum_s)
    assert first_alarm(steps, 101, SlowJob()) is None


def test_slow_job_of_a_batch_that_grows_says_nothing_where_the_log_names_it() -> None:
    assert first_alarm(steps_of("normal_0.02", 1, 6.0, ramp=True), 23, SlowJob()) is None


@pytest.mark.parametrize(("kind", "slower"), [("normal_0.02", 0.05), ("lognormal_0.1", 0.15), ("every_10th_3x", 0.05)])
def test_slow_job_finds_a_change_in_a_job_that_makes_noise(kind: str, slower: float) -> None:
    steps = steps_of(kind, 3, 5.0, slower=slower, slower_from_s=3 * 3600.0)
    found = first_alarm(steps, 7, SlowJob())
    assert found is not None and 0 < found[0] - 3 * 3600 < 3000
