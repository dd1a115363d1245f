"""Times of the week, as they are written."""

from __future__ import annotations

from datetime import datetime

import pytest

from slurm_watchdog.base.hours import is_within, parse_hours
from tests.builders.time_zone import time_zone

MONDAY = datetime(2026, 11, 23).astimezone()
"""In the time zone of this machine, as the function reads it."""


def at(day: int, hour: int, minute: int = 0) -> float:
    return MONDAY.replace(day=MONDAY.day + day, hour=hour, minute=minute).timestamp()


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ("08:00-18:00", [(0, 8, 0), (6, 17, 59)], [(0, 7, 59), (0, 18, 0)]),
        ("22:00-07:00", [(0, 22, 0), (1, 6, 59), (0, 3, 0)], [(0, 7, 0), (0, 21, 59)]),
        ("mon-fri 22:00-07:00", [(0, 23, 0), (5, 6, 0)], [(0, 6, 0), (5, 23, 0), (6, 3, 0)]),
        ("Sat,Sun 00:00-24:00", [(5, 0, 0), (6, 23, 59)], [(4, 23, 59), (0, 0, 0)]),
        ("fri-mon 12:00-13:00", [(4, 12, 0), (0, 12, 30)], [(1, 12, 0), (3, 12, 0)]),
        ("00:00-00:00", [(2, 0, 0), (2, 23, 59)], []),
    ],
)
def test_a_time_is_within_a_window(
    window: str, inside: list[tuple[int, int, int]], outside: list[tuple[int, int, int]]
) -> None:
    assert [is_within(window, at(*each)) for each in inside] == [True] * len(inside)
    assert [is_within(window, at(*each)) for each in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    "text", ["", "22-7", "22:00", "25:00-07:00", "22:60-07:00", "mo 22:00-07:00", "24:00-01:00", "fri- 22:00-07:00"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|no clock shows"):
        parse_hours(text)


def test_windows_at_night_hold_through_an_hour_that_is_left_out_or_comes_twice() -> None:
    with time_zone():
        for night in ("2026-03-28T22:00", "2026-10-24T22:00"):
            begin = datetime.fromisoformat(night).astimezone().timestamp()
            end = datetime.fromisoformat(f"{night[:8]}{int(night[8:10]) + 1}T07:00").astimezone().timestamp()
            inside = [begin + minute * 60.0 for minute in range(int((end - begin) // 60))]
            assert all(is_within("22:00-07:00", date) for date in inside)
            assert not is_within("22:00-07:00", begin - 1) and not is_within("22:00-07:00", end)
