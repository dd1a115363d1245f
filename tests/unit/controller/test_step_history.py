"""Step times of a whole run: ramps of hours, slow-downs that last longer than the recent times reach back,
and what is too short."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.logs.step_rows import make_event
from slurm_watchdog.controller.state.counter_clock import LEVEL_BLOCKS, Counter, CounterClock, DatedLines, StepHistory
from slurm_watchdog.controller.state.progress_clock import apply_step, main_clock
from slurm_watchdog.detect import slow_job
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.model.cluster_view import StepTime
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.parse.training_log.line import parse_line
from tests.builders.views import cluster, job

KEPT = 600


def run_of(levels: Iterable[float], seed: int = 1, noise: float = 0.02) -> Finding:
    """Of a job whose steps took so long, one after the other, all of them said by its log."""
    chance, at, history, times = random.Random(seed), 0.0, StepHistory(), []
    for step, level in enumerate(levels):
        seconds = level * (1 + chance.gauss(0, noise))
        at += seconds
        times.append(StepTime(step=step, seconds=seconds, at=at, logged=True))
        history.add(times[-1])
    view = job(step_times=tuple(times[-KEPT:]), step_history=history.blocks())
    (found,) = slow_job.detect(cluster(view, now=at), SlowJob())
    return found


def since(found: Finding) -> int:
    return int(found.summary.split("since step ")[1].split(":")[0])


@pytest.mark.parametrize("steps", [900, 3000, 20_000])
def test_slow_job_a_slowdown_that_lasts_stays_open_with_its_first_step_and_its_measured_times(
    steps: int,
) -> None:
    found = run_of([1.0] * 500 + [1.2] * steps)
    assert found.truth is Truth.BAD
    assert abs(since(found) - 500) <= max(40, steps // 100)
    before_s, after_s = (float(each) for each in re.findall(r"([0-9.]+) s", found.summary))
    assert (before_s, after_s) == (pytest.approx(1.0, abs=0.01), pytest.approx(1.2, abs=0.01))


def test_slow_job_a_ramp_of_hours_is_found_although_no_two_steps_differ() -> None:
    hours = 6 * 3600
    found = run_of([1.0 + 0.3 * n / hours for n in range(hours)])
    assert found.truth is Truth.BAD
    assert float(found.summary.split(" is ")[1].split(" %")[0]) > 10


@pytest.mark.parametrize("noise", [0.003, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("steps", [800, 5000])
def test_slow_job_noise_of_a_long_run_is_no_slowdown(noise: float, steps: int) -> None:
    assert all(run_of([1.0] * steps, seed, noise).truth is Truth.OK for seed in range(5))


@pytest.mark.parametrize("every", [10, 50, 100])
def test_slow_job_pauses_at_regular_steps_are_learnt(every: int) -> None:
    assert run_of([1.0 + 4.0 * (n % every == 0) for n in range(4000)]).truth is Truth.OK


def test_slow_job_a_run_that_is_fast_again_is_well() -> None:
    assert run_of([1.0] * 500 + [1.2] * 3000 + [1.0] * 700).truth is Truth.OK


@pytest.mark.parametrize(
    ("step_s", "slow", "truth"),
    [
        (0.1, 1000, Truth.UNKNOWN),  # 30 steps and more, and two minutes
        (0.1, 9000, Truth.BAD),
        (60.0, 25, Truth.OK),  # half an hour, and 25 steps
        (60.0, 40, Truth.BAD),
    ],
)
def test_slow_job_less_than_a_quarter_of_an_hour_or_thirty_steps_is_not_worth_a_message(
    step_s: float, slow: int, truth: Truth
) -> None:
    assert run_of([step_s] * max(200, int(120 / step_s)) + [1.3 * step_s] * slow).truth is truth


def test_step_history_is_bounded_and_covers_the_whole_run() -> None:
    history = StepHistory()
    for step in range(200_000):
        history.add(StepTime(step=step, seconds=1.0 + step, at=float(step), logged=True))
    blocks = history.blocks()
    assert LEVEL_BLOCKS * 4 < len(blocks) <= LEVEL_BLOCKS * 8
    assert blocks[0].step < 10 and blocks[-1].step > 199_900
    assert all(a.step < b.step for a, b in pairwise(blocks))


def clock_of(lines: Iterable[str], look_s: float = 5.0, in_one_look: int = 7) -> CounterClock:
    """What the controller makes of dated lines of which an agent reads some in each look."""
    clocks: dict[Counter, CounterClock] = {}
    for number, line in enumerate(lines):
        fact = parse_line(line)
        assert fact is not None
        event = replace(make_event(fact, 0.0), job_id="1", source="/log")
        apply_step(clocks, event, look_s * (number // in_one_look))
    found = main_clock(clocks)
    assert found is not None
    return found


def titan(step: int, at: float) -> str:
    whole, part = divmod(at, 60.0)
    stamp = f"2026-05-01 10:{int(whole):02d}:{part:06.3f}".replace(".", ",")
    return f"[titan] {stamp} - root - INFO - step: {step}  loss:  2.3100  memory: 40.20GiB(42.31%)  tps: 7,234"


def test_step_times_come_from_the_dates_of_the_lines_and_never_from_the_looks_of_the_agent() -> None:
    clock = clock_of([titan(step, 0.71 * step) for step in range(1, 200)])
    assert len(clock.times) > 190
    assert all(time.logged and time.seconds == pytest.approx(0.71, abs=0.01) for time in clock.times)


def test_step_times_without_dates_and_without_a_figure_are_the_agents_and_are_not_compared() -> None:
    clock = clock_of([f"step {step}/1000 loss 2.31" for step in range(1, 200)])
    assert not any(time.logged for time in clock.times)
    # Seven lines in each look of 5 s; the last look had three of them when the log ended.
    assert all(time.seconds == pytest.approx(5 / 7) for time in list(clock.times)[:-1])


def test_dated_lines_with_whole_seconds_wait_until_an_error_of_a_second_is_small() -> None:
    lines = DatedLines()
    taken = [lines.step_seconds(step, float(int(1.7 * step)), other=False) for step in range(100)]
    times = [each for each in taken if each is not None]
    assert len(times) >= 6
    assert all(abs(each - 1.7) < 0.1 for each in times)


def test_dated_lines_leave_out_an_evaluation_and_a_clock_that_was_set_back() -> None:
    lines = DatedLines()
    assert lines.step_seconds(1, 100.5, other=False) is None
    assert lines.step_seconds(2, 101.5, other=False) == 1.0
    assert lines.step_seconds(3, 900.5, other=True) is None  # the evaluation lies before it
    assert lines.step_seconds(4, 901.5, other=False) == 1.0
    assert lines.step_seconds(5, 10.5, other=False) is None
    assert lines.step_seconds(5, 10.5, other=False) is None
