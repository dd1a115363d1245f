"""What a pure function said of a series is remembered while the series may be asked about again, and not for ever."""

from __future__ import annotations

import pytest

from slurm_watchdog.analysis.memo import MAX_VALUES, OF_ANSWER, by_identity


@pytest.fixture
def asked() -> list[tuple[float, ...]]:
    return []


def test_the_same_series_is_judged_once_for_the_same_arguments(asked: list[tuple[float, ...]]) -> None:
    @by_identity
    def largest(values: tuple[float, ...], least: float, *, most: float = 10.0) -> float:
        asked.append(values)
        return min(most, max(least, *values))

    series = (1.0, 2.0)
    assert [largest(series, 0.0), largest(series, 0.0), largest(series, 5.0), largest(series, 5.0, most=3.0)] == [
        2,
        2,
        5,
        3,
    ]
    assert len(asked) == 3
    assert largest((1.0, float(2)), 0.0) == 2.0, "an equal one is another one"


def test_a_thousand_jobs_are_remembered_and_their_older_series_are_not(asked: list[tuple[float, ...]]) -> None:
    @by_identity
    def first(values: tuple[float, ...]) -> float:
        asked.append(values)
        return values[0]

    jobs = [tuple(map(float, range(job, job + 200))) for job in range(1_000)]
    for _ in range(3):
        for series in jobs:
            first(series)
    assert len(asked) == len(jobs)
    newer = [tuple(map(float, range(job, job + 200))) for job in range(3_000)]
    for series in newer:
        first(series)
    asked.clear()
    first(jobs[0])
    first(newer[-1])
    assert asked == [jobs[0]]


def test_an_answer_with_a_part_for_each_rank_has_its_weight(asked: list[tuple[float, ...]]) -> None:
    ranks = 400

    @by_identity
    def of_ranks(values: tuple[float, ...]) -> dict[int, float]:
        asked.append(values)
        return dict.fromkeys(range(ranks), values[0])

    fitting = MAX_VALUES // (1 + 2 + OF_ANSWER * ranks)
    series = [(float(n), 0.0) for n in range(fitting + 1)]
    for each in series[:-1]:
        of_ranks(each)
    asked.clear()
    for each in series[:-1]:
        of_ranks(each)
    assert asked == []
    of_ranks(series[-1])
    of_ranks(series[0])
    assert asked == [series[-1], series[0]]


def test_a_series_that_is_larger_than_all_that_is_remembered_is_remembered_alone(
    asked: list[tuple[float, ...]],
) -> None:
    @by_identity
    def length(values: tuple[float, ...]) -> int:
        asked.append(values)
        return len(values)

    huge, small = (0.0,) * (MAX_VALUES + 1), (0.0,)
    assert [length(huge), length(huge), length(small), length(small)] == [MAX_VALUES + 1, MAX_VALUES + 1, 1, 1]
    assert asked == [huge, small]
