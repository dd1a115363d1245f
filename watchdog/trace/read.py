"""From bytes to moments: lines of bounded length, records in the order of time, records of one moment together. Pure.

A trace is read as a stream; what is kept at once are the records of some seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median

from watchdog.trace.records import MAX_LINE_BYTES, Any_, Damage, Gpu, Proc, Report, Tally, parse_record

CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
WINDOW_S = 10.0
"""Records may be so much out of order: two report intervals."""
LEAP_S = 86400.0
"""A line this far ahead of all others is believed only if others follow it there."""
CONFIRMED_BY = 20
"""Lines that make a leap believed, and that say where the trace begins."""
MOMENT_S = 0.5
"""Records of this time belong together: agents do not report more often."""

Numbered = tuple[float, int, "Any_ | Damage"]
"""(time, line number, record)."""


@dataclass
class Moment:
    """What was said at about the same time. `t` is that of its last record."""

    t: float
    records: list[Any_ | Damage] = field(default_factory=list)


def read_lines(read: Callable[[int], bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(number, line without its end) of all lines that are not empty; None for one that is too long."""
    number, pending, too_long = 0, b"", False
    while chunk := read(CHUNK_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            number += 1
            if too_long or len(line) > MAX_LINE_BYTES:
                too_long = False
                yield number, None
            elif line := line.strip():
                yield number, line.removeprefix(BOM) if line[0] == BOM[0] else line
        if too_long or len(pending) > MAX_LINE_BYTES:
            pending, too_long = b"", True
    if too_long or len(pending) > MAX_LINE_BYTES:
        yield number + 1, None
    elif pending.strip():
        yield number + 1, pending.strip().removeprefix(BOM)


def read_records(lines: Iterable[tuple[int, bytes | None]], tally: Tally) -> Iterator[Numbered]:
    """The records of these lines as they stand; a damaged line is dated like the one before it."""
    last_t = 0.0
    for number, line in lines:
        tally.lines += 1
        if line is None:
            tally.skip(f"longer than {MAX_LINE_BYTES} bytes", number)
            record: Any_ | Damage | None = Damage(t=0.0)
        else:
            record = parse_record(line, number, tally)
        if record is None:
            continue
        if type(record) is Damage:
            record.t = last_t
        else:
            last_t = record.t
        yield record.t, number, record


@dataclass
class _Order:
    """Puts records in the order of time, within a window, and leaves out those whose time can't be."""

    tally: Tally
    newest: float
    floor: float
    waiting: list[Numbered] = field(default_factory=list)
    ahead: list[Numbered] = field(default_factory=list)

    def put_plainly(self, each: Numbered) -> bool:
        """Takes a record that is in its place and ends nothing: nearly all are. False: put() has to see to it."""
        t = each[0]
        if t < self.floor or self.ahead or t - self.floor > 3 * WINDOW_S or t > self.newest + LEAP_S:
            return False
        self.waiting.append(each)
        if t > self.newest:
            self.newest = t
        return True

    def put(self, each: Numbered) -> Iterator[Any_ | Damage]:
        t = each[0]
        if t > self.newest + LEAP_S:
            self.ahead.append(each)
            if len(self.ahead) >= CONFIRMED_BY:
                yield from self._leap()
            return
        if self.ahead and not isinstance(each[2], Damage):
            self._forget_ahead()
        if t < self.floor:
            if not isinstance(each[2], Damage):
                self.tally.skip("the time goes back", each[1])
            return
        self.waiting.append(each)
        if t > self.newest:
            self.newest = t
            if t - self.floor > 3 * WINDOW_S:
                yield from self.take(t - WINDOW_S)

    def take(self, until: float) -> Iterator[Any_ | Damage]:
        """What is older than `until`, in order."""
        self.waiting.sort(key=itemgetter(0, 1))
        count = bisect_left(self.waiting, until, key=itemgetter(0))
        ready, self.waiting = self.waiting[:count], self.waiting[count:]
        self.floor = max(self.floor, until)
        for _, _, record in ready:
            if type(record) is not Damage:
                self.tally.used += 1
            yield record

    def end(self) -> Iterator[Any_ | Damage]:
        self._forget_ahead()
        yield from self.take(float("inf"))

    def _leap(self) -> Iterator[Any_ | Damage]:
        """The trace goes on at another time: where most of the lines say."""
        yield from self.take(float("inf"))
        group, self.ahead = self.ahead, []
        self.newest = median(t for t, _, _ in group)
        self.floor = self.newest - LEAP_S
        for each in group:
            if abs(each[0] - self.newest) <= LEAP_S:
                yield from self.put(each)
            else:
                self.tally.skip("a time far from that of all other lines", each[1])

    def _forget_ahead(self) -> None:
        for _, number, record in self.ahead:
            if not isinstance(record, Damage):
                self.tally.skip("a time far from that of all other lines", number)
        self.ahead.clear()


def in_order(records: Iterable[Numbered], tally: Tally) -> Iterator[Any_ | Damage]:
    """The records in the order of time (of lines, where it is the same). Those far out of order are skipped and counted."""
    order: _Order | None = None
    first: list[Numbered] = []
    for each in records:
        if order is None:
            first.append(each)
            if len(first) < CONFIRMED_BY:
                continue
            order = _begin(first, tally)
            for early in first:
                yield from order.put(early)
        elif not order.put_plainly(each):
            yield from order.put(each)
    if order is None and first:
        order = _begin(first, tally)
        for early in first:
            yield from order.put(early)
    if order is not None:
        yield from order.end()


def _begin(first: list[Numbered], tally: Tally) -> _Order:
    middle = median(t for t, _, _ in first)
    return _Order(tally, newest=middle, floor=max(0.0, middle - LEAP_S))


def moments(records: Iterable[Any_ | Damage]) -> Iterator[Moment]:
    """Records that are in order, together with those of the same moment."""
    now: Moment | None = None
    begun_at = 0.0
    for record in records:
        if now is not None and record.t - begun_at < MOMENT_S:
            now.records.append(record)
            now.t = record.t
            continue
        if now is not None:
            yield now
        now, begun_at = Moment(record.t, [record]), record.t
    if now is not None:
        yield now


def typical_interval_s(early: Iterable[Moment]) -> float | None:
    """The median time between two reports of the same node; None where no node reported twice."""
    last: dict[str, float] = {}
    gaps: list[float] = []
    for moment in early:
        for node in {each.node for each in moment.records if isinstance(each, Report | Proc | Gpu)}:
            if node in last:
                gaps.append(moment.t - last[node])
            last[node] = moment.t
    return median(gaps) if gaps else None
