"""slurm_watchdog.analysis.lateness: who comes last, by what agents see of simulated trainings."""

from __future__ import annotations

import pytest

from slurm_watchdog.analysis.lateness import rank_lateness
from tests.builders.stragglers import Training, Work, late, turns


def trained(work: Work, *, minutes: float = 15.0, **kind: bool) -> Training:
    training = Training(1, work, **kind)  # type: ignore[arg-type]
    training.run(0.0, minutes * 60.0)
    return training


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("ranks", [{5}, {4, 5, 6, 7}, {0}])
def test_ranks_that_the_others_wait_for_are_late_by_the_time_that_those_wait(ranks: set[int], gpus: bool) -> None:
    found = rank_lateness(trained(late(ranks, 0.5), gpus=gpus, spins=gpus).blocks())
    assert {key.rank for key, each in found.items() if each.is_late} == ranks
    # Half of nine tenths of a step more, in a step that is by so much longer: 0.45 of 1.45.
    assert all(each.ratio == pytest.approx(0.31, abs=0.06) for each in found.values() if each.is_late)
    assert all(each.ratio < 0.1 for each in found.values() if not each.is_late)


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize(
    "work", [late((), 0.0), turns(16, 0.3), late(range(16), 0.5)], ids=["all alike", "turns", "all"]
)
def test_where_nobody_comes_last_nobody_is_late(work: Work, gpus: bool) -> None:
    found = rank_lateness(trained(work, gpus=gpus, spins=gpus).blocks())
    assert len(found) == 16 and not any(each.is_late for each in found.values())


def test_of_what_was_not_looked_at_for_long_enough_and_of_few_ranks_nothing_is_said() -> None:
    assert rank_lateness(()) == {}
    assert rank_lateness(trained(late({1}, 0.5), minutes=3.0).blocks()) == {}
    few = Training(1, late({1}, 0.5), ranks=3)
    few.run(0.0, 900.0)
    assert rank_lateness(few.blocks()) == {}
