"""When a line of a log was written, as far as it says so. Pure.

Programs write time in dozens of ways, and the lines of one job's log come from several clocks: with a year or
without, with a zone or without, the time of day alone. Only times of one sort may be compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Final

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.python310 import read_iso_time
from slurm_watchdog.base.structs import Struct

SEEN_CHARS = 160  # A line's time stands within its first characters, or nowhere.
DAY_S = 86400.0
SOME_YEAR = 2024  # For dates without one; a leap year, so that each of them exists.

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_TIME = r"(?P<h>[01]\d|2[0-3]):(?P<mi>[0-5]\d):(?P<s>[0-5]\d|60)(?:[.,:](?P<f>\d{1,9}))?"
_FULL = late_regex(
    r"(?<!\d)(?P<y>20\d\d)[-/.]?(?P<mo>0[1-9]|1[0-2])[-/.]?(?P<d>0[1-9]|[12]\d|3[01])[T _,-]{1,2}"
    + _TIME
    + r"(?: ?(?P<z>Z\b|UTC\b|GMT\b|[+-]\d\d:?\d\d\b))?"
)
_MONTH_FIRST = late_regex(
    r"(?<!\d)(?P<mo>0[1-9]|1[0-2])/(?P<d>0[1-9]|[12]\d|3[01])/(?P<y>20\d\d)[ ,T-]+" + _TIME + r"(?: (?P<ap>[AP]M))?"
)
_SHORT_YEAR = late_regex(
    r"(?<![\d/-])(?:(?P<y>2\d)[-/](?P<mo>0[1-9]|1[0-2])[-/](?P<d>0[1-9]|[12]\d|3[01])"
    r"|(?P<mo2>0[1-9]|1[0-2])/(?P<d2>0[1-9]|[12]\d|3[01])/(?P<y2>2\d))[ T]" + _TIME
)
"""Year first, or month first as rich writes it (`[%x %X]`)."""
_NAMED = late_regex(
    r"(?<!\w)(?:(?P<d2>\d{1,2})[/ ](?P<n2>[A-Z][a-z]{2})[/ ](?P<y2>20\d\d)[: ]|(?P<n>[A-Z][a-z]{2}) +(?P<d>\d{1,2}) )"
    + _TIME
    + r"(?: (?P<y>20\d\d)\b)?"
)
_GLOG = late_regex(r"(?<![A-Za-z\d])[IWEF](?P<mo>0?[1-9]|1[0-2])(?P<d>0[1-9]|[12]\d|3[01]) " + _TIME)
_SHORT = late_regex(r"(?<![\d/-])(?P<mo>0[1-9]|1[0-2])[/-](?P<d>0[1-9]|[12]\d|3[01])[ T]" + _TIME)
_CLOCK = late_regex(r"^[\s\[(<]{0,3}" + _TIME + r"(?![:\d<])")
_EPOCH = late_regex(
    r"(?:^\[?|\"?(?:ts|time|time_ms|timestamp|unixtime|created|_timestamp"
    r"|t)\"?\s*[:=]\s*)(?P<epoch>1[5-9]\d{8}(?:\d{3}\b|\.\d+|\b))"
)
_WAYS = (_FULL, _MONTH_FIRST, _SHORT_YEAR, _NAMED, _GLOG, _SHORT, _CLOCK)
"""To write a time, in the order in which they are tried."""


class Stamp(Struct, kw_only=False):
    sort: str  # `zoned`, `local` (a full date without a zone), `dated` (no year), `clock` (time of day).
    seconds: float  # Since 1970 as if its zone were UTC; of `clock` since midnight.


def stamp_of(line: str) -> Stamp | None:
    """The time that stands at the beginning of a line."""
    text = line[:SEEN_CHARS]
    for pattern in _WAYS if ":" in text else ():
        if (match := pattern.search(text)) is None:
            continue
        found = {name.rstrip("2"): value for name, value in match.groupdict().items() if value}
        month = _MONTHS.get(found["n"].lower()) if "n" in found else int(found.get("mo", 0))
        if month is None:
            continue
        year = int(found.get("y", SOME_YEAR if month else 1970))
        seconds = _seconds(match, year if year > 99 else 2000 + year, month or 1, int(found.get("d", 1)))
        if seconds is None:
            return None
        if "ap" in found:
            seconds += DAY_S / 2 * ((found["ap"] == "PM") - (int(found["h"]) == 12))
        return _zoned(seconds, found.get("z")) if "y" in found else Stamp("dated" if month else "clock", seconds)
    number = match["epoch"] if (match := _EPOCH.search(text)) is not None else ""
    return Stamp("zoned", float(number) / (1000 if len(number) == 13 and "." not in number else 1)) if number else None


def _seconds(match: re.Match[str], year: int, month: int, day: int) -> float | None:
    try:
        at = datetime(
            year, month, day, int(match["h"]), int(match["mi"]), min(59, int(match["s"])), tzinfo=timezone.utc
        )
    except ValueError:
        return None
    fraction = match["f"] or ""
    return at.timestamp() + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


def _zoned(seconds: float, zone: str | None) -> Stamp:
    if not zone:
        return Stamp("local", seconds)
    if zone in ("Z", "UTC", "GMT"):
        return Stamp("zoned", seconds)
    sign = -1 if zone[0] == "-" else 1
    digits = zone[1:].replace(":", "")
    offset = sign * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
    return Stamp("zoned", seconds - offset)


def origin_of(stamps: Sequence[Stamp]) -> Stamp | None:
    """The stamp whose sort is the scale of a log: the first one of full dates if these are most of its times, else the
    first of all. A launcher's few lines at its head may have no year."""
    if not stamps:
        return None
    sort = Counter(stamp.sort for stamp in stamps).most_common(1)[0][0]
    return next((stamp for stamp in stamps if stamp.sort == sort in ("zoned", "local")), stamps[0])


class Clock:
    """Puts the stamps of one log, in its order, on one scale; those that do not fit on it give None.

    The scale is that of its `origin`, or of whatever comes first. Dates without a year take the last known one's;
    times of day take the last known date, and continue with the next day behind midnight.
    """

    def __init__(self, origin: Stamp | None = None) -> None:
        self.sort = None if origin is None else origin.sort
        self._last = None if origin is None else origin.seconds

    def place(self, stamp: Stamp | None) -> float | None:
        """Seconds on the log's scale."""
        if stamp is None:
            return None
        if self.sort is None:
            self.sort = stamp.sort
        at = self._on_scale(stamp)
        if at is not None:
            self._last = at
        return at

    def _on_scale(self, stamp: Stamp) -> float | None:
        if stamp.sort == "dated" == self.sort and self._last is not None:
            return _nearest_year(stamp.seconds, self._last)
        if stamp.sort == self.sort and stamp.sort != "clock":
            return stamp.seconds
        if stamp.sort == "clock" and self.sort in ("clock", "local", "dated"):
            return self._of_day(stamp.seconds)
        if stamp.sort == "dated" and self.sort == "local" and self._last is not None:
            return _nearest_year(stamp.seconds, self._last)
        return None  # another zone, perhaps: not to be compared

    def _of_day(self, seconds: float) -> float:
        if self._last is None:
            return seconds
        day = self._last - self._last % DAY_S
        at = day + seconds
        if at < self._last - DAY_S / 2:
            return at + DAY_S
        return at - DAY_S if at > self._last + DAY_S / 2 else at


def _nearest_year(seconds: float, last: float) -> float | None:
    """A date without a year, in the year in which it is nearest to `last`: a log continues after New Year's Eve."""
    moved, year = datetime.fromtimestamp(seconds, timezone.utc), datetime.fromtimestamp(last, timezone.utc).year
    near = [at for each in (year - 1, year, year + 1) if (at := _in_year(moved, each)) is not None]
    return min(near, key=lambda at: abs(at - last), default=None)


def _in_year(moment: datetime, year: int) -> float | None:
    try:
        return moment.replace(year=year).timestamp()
    except ValueError:  # the 29th of February
        return None


def on_scale_of(seen: float, sort: str | None, ends: float | None) -> float:
    """When a log was seen (seconds since 1970), on the scale of its own times, whose last one is `ends`:
    where these have no year, or no date at all, the first moment that fits, for no one may claim more years
    or days of silence than are known."""
    if ends is None or sort not in ("clock", "dated"):
        return seen
    if sort == "clock":
        return ends + (seen - ends) % DAY_S
    moment, year = datetime.fromtimestamp(seen, timezone.utc), datetime.fromtimestamp(ends, timezone.utc).year
    fitting = [at for each in (year, year + 1, year + 2) if (at := _in_year(moment, each)) and at >= ends - DAY_S]
    return min(fitting, default=seen)


YEAR_10000: Final = 253_402_300_800.0
"""Seconds since 1970: no date comes after it, and neither NaN nor infinity is before it."""


def parse_time(text: str, sort: str | None) -> float | None:
    """What a person wrote (a date and time, or seconds since 1970), on the scale of a log of `sort`; None if
    it is no time.

    A time without a zone is taken as the log's own; of one with a zone, a log without zones is compared with
    the digits.
    """
    text = text.strip()
    try:
        epoch = float(text)
    except ValueError:
        pass
    else:
        return epoch if 0 <= epoch < YEAR_10000 else None
    try:
        at = read_iso_time(text.replace("_", "T"))
    except ValueError:
        stamp = stamp_of(text)
        if stamp is None:
            return None
        return stamp.seconds
    if at.tzinfo is not None and sort != "zoned":
        at = at.replace(tzinfo=None)
    return (at if at.tzinfo is not None else at.replace(tzinfo=timezone(timedelta(0)))).timestamp()
