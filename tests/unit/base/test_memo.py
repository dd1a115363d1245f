"""What a pure function said of a series is remembered as long as the series is there, and no longer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from slurm_watchdog.base.memo import Series, by_identity
from slurm_watchdog.base.structs import Struct


@pytest.fixture
def asked() -> list[int]:
    return []


def test_the_same_series_is_judged_once_for_the_same_arguments(asked: list[int]) -> None:
    @by_identity
    def largest(values: tuple[float, ...], least: float, *, most: float = 10.0) -> float:
        asked.append(len(values))
        return min(most, max(least, *values))

    series = Series((1.0, 2.0))
    found = [largest(series, 0.0), largest(series, 0.0), largest(series, 5.0), largest(series, 5.0, most=3.0)]
    assert found == [2, 2, 5, 3]
    assert len(asked) == 3
    assert largest(Series(series), 0.0) == 2.0
    assert len(asked) == 4, "an equal one is another one"


def test_two_functions_say_two_things_of_one_series(asked: list[int]) -> None:
    @by_identity
    def first(values: tuple[int, ...]) -> int:
        return values[0]

    @by_identity
    def last(values: tuple[int, ...]) -> int:
        return values[-1]

    series = Series((1, 2, 3))
    assert [first(series), last(series), first(series), last(series)] == [1, 3, 1, 3]


def test_of_a_plain_tuple_nothing_is_remembered(asked: list[int]) -> None:
    @by_identity
    def length(values: tuple[int, ...]) -> int:
        asked.append(len(values))
        return len(values)

    assert [length((1, 2)), length(()), length((1, 2))] == [2, 0, 2]
    assert asked == [2, 0, 2]


def test_a_value_with_a_dictionary_is_asked_once_and_one_made_from_it_again(asked: list[int]) -> None:
    class Large(Struct, gc=True, dict=True):
        number: int

    @by_identity
    def double(value: Large) -> int:
        asked.append(value.number)
        return 2 * value.number

    one = Large(number=1)
    assert [double(one), double(one), double(replace(one, number=2)), double(Large(number=1))] == [2, 2, 4, 2]
    assert asked == [1, 2, 1]


def test_an_answer_goes_with_its_series() -> None:
    class Answer(dict[int, float]):
        pass

    @by_identity
    def of_ranks(values: tuple[float, ...]) -> Mapping[int, float]:
        return Answer.fromkeys(range(400), values[0])

    series = Series((0.5,))
    gone = weakref.ref(of_ranks(series))
    assert of_ranks(series) is gone()
    del series
    assert gone() is None


def test_a_series_is_the_tuple_that_it_was_made_of() -> None:
    series = Series((1.0, 2.0))
    assert series == (1.0, 2.0)
    assert {series: 1}[(1.0, 2.0)] == 1  # type: ignore[index]
