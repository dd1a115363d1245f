"""Whose turn it is: all jobs while they are few, never more than a tick can bear, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.controller.state.cluster import (
    AT_LEAST,
    PROCESSES_A_TICK,
    TICK_CPU_S,
    ProcessBudget,
    ScheduledJob,
    choose,
)


def turn(number: int, *, size: int = 10, restless: bool = False, looked_at: float = 0.0) -> ScheduledJob:
    return ScheduledJob(job_id=f"{number:04d}", size=size, restless=restless, looked_at=looked_at)


def test_a_small_cluster_is_looked_at_whole_in_every_tick() -> None:
    turns = [turn(n) for n in range(50)]
    assert choose(turns, 500) == {each.job_id for each in turns}


def test_jobs_with_news_come_first_and_half_the_tick_is_for_those_that_waited_longest() -> None:
    turns = [turn(n, looked_at=float(n), restless=n >= 90) for n in range(100)]
    assert choose(turns, 100) == {f"{n:04d}" for n in (*range(5), *range(90, 95))}


def test_trouble_everywhere_starves_nobody() -> None:
    looked = dict.fromkeys(range(100), 0.0)
    for tick in range(1, 30):
        chosen = choose([turn(n, looked_at=at, restless=n % 2 == 0) for n, at in looked.items()], 100)
        looked |= {n: float(tick) for n in looked if f"{n:04d}" in chosen}
        if tick > 15:
            assert tick - min(looked.values()) <= 15


def test_a_job_larger_than_a_tick_is_looked_at_all_the_same() -> None:
    assert choose([turn(1, size=10**6), turn(2)], 100) == {"0001"}
    assert choose([turn(1, size=10**6, looked_at=5.0), turn(2)], 100) == {"0002"}


@given(st.lists(st.tuples(st.integers(1, 500), st.booleans(), st.sampled_from([float("-inf"), 0.0, 1.0])), max_size=60))
def test_the_order_in_which_jobs_are_known_changes_nothing(rows: list[tuple[int, bool, float]]) -> None:
    turns = [turn(n, size=s, restless=r, looked_at=at) for n, (s, r, at) in enumerate(rows)]
    chosen = choose(turns, 1000)
    assert chosen == choose(reversed(turns), 1000)
    assert bool(chosen) == bool(turns)
    largest = max((each.size for each in turns), default=0)
    assert sum(each.size for each in turns if each.job_id in chosen) <= 1000 + 2 * largest


def ticks(budget: ProcessBudget, cpu_s_per_process: float, *, there: int = 80_000, number: int = 20) -> int:
    """What the budget is after so many ticks on one core."""
    for _ in range(number):
        budget.walked = min(budget.most, there)
        budget.note(cpu_s_per_process * budget.walked)
    return budget.most


def test_a_slow_core_walks_over_fewer_processes_and_a_fast_one_over_all_that_a_tick_may() -> None:
    budget = ProcessBudget()
    assert ticks(budget, TICK_CPU_S / PROCESSES_A_TICK / 2) == PROCESSES_A_TICK
    assert abs(ticks(budget, TICK_CPU_S / 6_000) - 6_000) <= 1
    assert ticks(budget, 1.0) == AT_LEAST
    assert ticks(budget, TICK_CPU_S / PROCESSES_A_TICK / 2) >= PROCESSES_A_TICK - 1, "it is as fast as before again"


def test_one_slow_tick_and_a_small_cluster_change_little() -> None:
    budget = ProcessBudget()
    budget.walked = PROCESSES_A_TICK
    budget.note(100 * TICK_CPU_S)
    assert budget.most > PROCESSES_A_TICK // 2
    assert ticks(ProcessBudget(), 1.0, there=AT_LEAST - 1) == PROCESSES_A_TICK
