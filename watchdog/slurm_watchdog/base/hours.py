"""Times of the week, as people write them: `22:00-07:00`, `mon-fri 08:00-18:00`, `sat,sun 00:00-24:00`. Pure."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import lru_cache

from slurm_watchdog.base.late_regex import late_regex

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
_WINDOW = late_regex(r"(?:([a-z,\-]+) )?(\d\d):(\d\d)-(\d\d):(\d\d)")


@lru_cache(maxsize=256)
def parse_hours(text: str) -> tuple[frozenset[int], int, int]:
    """The days on which a window begins (0 is Monday), its first minute, and how many minutes it is long: one that
    ends no later than it begins ends the day after. Raises ValueError."""
    found = _WINDOW.fullmatch(" ".join(text.lower().split()))
    if found is None:
        raise ValueError(f"{text[:60]!r} is not a time of the week; use 22:00-07:00 or sat,sun 00:00-24:00")
    named, *numbers = found.groups()
    hour, minute, end_hour, end_minute = map(int, numbers)
    begin, end = 60 * hour + minute, 60 * end_hour + end_minute
    if minute > 59 or end_minute > 59 or begin >= DAY_MIN or end > DAY_MIN:
        raise ValueError(f"{text[:60]!r} has a time that no clock shows")
    days = frozenset(range(7)) if named is None else frozenset(day for part in named.split(",") for day in _days(part))
    return days, begin, end - begin if end > begin else end - begin + DAY_MIN


def _days(part: str) -> list[int]:
    first, dash, last = part.partition("-")
    unknown = [each for each in ((first, last) if dash else (first,)) if each not in DAYS]
    if unknown:
        raise ValueError(f"{unknown[0][:20]!r} is not a day; known: {', '.join(DAYS)}")
    begin, end = DAYS.index(first), DAYS.index(last if dash else first)
    return [(begin + number) % 7 for number in range((end - begin) % 7 + 1)]


def is_within(text: str, at: float) -> bool:
    """Whether a date lies in the window, by the clock of this machine's time zone."""
    days, begin, minutes = parse_hours(text)
    local = datetime.fromtimestamp(at, tz=timezone.utc).astimezone()
    minute = 60 * local.hour + local.minute
    today, yesterday = minute - begin, minute - begin + DAY_MIN
    return (local.weekday() in days and 0 <= today < minutes) or (
        (local.weekday() - 1) % 7 in days and yesterday < minutes
    )
