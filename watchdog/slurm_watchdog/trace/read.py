"""From bytes to moments: lines of bounded length, records in the order of time, records of one moment together. Pure.

A trace is read as a stream; what is kept at once are the records of some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, islice

from slurm_watchdog.base.averages import median
from slurm_watchdog.trace.records import MAX_LINE_BYTES, Any_, BadLine, Gpu, ParseStats, Proc, Report, parse_record

CHUNK_BYTES = 1 << 18
BOM = b"\xef\xbb\xbf"
WINDOW_S = 10.0  # Records may be so much out of order: two report intervals.
LEAP_S = 86400.0  # A line this far ahead of all others is believed only if others follow it there.
CONFIRMED_BY = 20  # Lines that make a leap believed, and that say where the trace begins.
MOMENT_S = 0.5  # Records of this time belong together: agents do not report more often.

Numbered = tuple[int, Any_ | BadLine]  # (line number, record).


@dataclass
class Moment:
    """What was said at about the same time. `t` is that of its last record."""

    t: float
    records: list[Any_ | BadLine] = field(default_factory=list)


def read_moments(read: Callable[[int], bytes], tally: ParseStats) -> Iterator[Moment]:
    """The moments of the trace that `read(n)` gives in pieces of at most n bytes. Raises what `read` raises."""
    return moments(in_order(read_records(read, tally), tally))


def _lines(read: Callable[[int], bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(number, line without its end); None for one that is too long."""
    number, pending, too_long = 1, b"", False
    while chunk := read(CHUNK_BYTES):
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield number, None if too_long or len(line) > MAX_LINE_BYTES else line
            number, too_long = number + 1, False
        if len(pending) > MAX_LINE_BYTES:
            pending, too_long = b"", True
    if too_long or pending:
        yield number, None if too_long else pending


def read_records(read: Callable[[int], bytes], tally: ParseStats) -> Iterator[Numbered]:
    """The records as they stand; a damaged line is dated like the one before it."""
    last_t = 0.0
    record: Any_ | BadLine | None
    for number, line in _lines(read):
        if line is None:
            tally.skip(f"longer than {MAX_LINE_BYTES} bytes", number)
            record = BadLine(t=0.0)
        elif stripped := line.strip():
            record = parse_record(stripped.removeprefix(BOM), number, tally)
        else:
            continue
        tally.lines += 1
        if type(record) is BadLine:
            record.t = last_t
        if record is not None:
            last_t = record.t
            yield number, record


@dataclass
class _Order:
    """Puts records in the order of time, within a window, and leaves out those whose time can't be."""

    tally: ParseStats
    newest: float
    floor: float
    waiting: list[tuple[float, int, Any_ | BadLine]] = field(default_factory=list)  # A heap: (time, line number, …).
    ahead: list[Numbered] = field(default_factory=list)

    def put(self, number: int, record: Any_ | BadLine) -> Iterator[Any_ | BadLine]:
        """Takes a record; gives those that cannot be overtaken any more."""
        t = record.t
        if t > self.newest + LEAP_S:
            self.ahead.append((number, record))
            if len(self.ahead) >= CONFIRMED_BY:
                yield from self._leap()
            return
        if self.ahead and not isinstance(record, BadLine):
            self._forget_ahead()
        if t < self.floor:
            if not isinstance(record, BadLine):
                self.tally.skip("the time goes back", number)
            return
        heappush(self.waiting, (t, number, record))
        if t > self.newest:  # which at first is in the middle of the first lines
            self.newest = t
            if t - self.floor > 3 * WINDOW_S:
                yield from self._before(t - WINDOW_S)

    def _before(self, until: float) -> Iterator[Any_ | BadLine]:
        """What is older than `until`, in order."""
        while self.waiting and self.waiting[0][0] < until:
            record = heappop(self.waiting)[2]
            self.tally.used += type(record) is not BadLine
            yield record
        self.floor = max(self.floor, until)

    def end(self) -> Iterator[Any_ | BadLine]:
        self._forget_ahead()
        yield from self._before(float("inf"))

    def _leap(self) -> Iterator[Any_ | BadLine]:
        """The trace continues at another time: where most of the lines are."""
        yield from self._before(float("inf"))
        group, self.ahead = self.ahead, []
        self.newest = median(record.t for _, record in group)
        self.floor = self.newest - LEAP_S
        for number, record in group:
            if abs(record.t - self.newest) <= LEAP_S:
                yield from self.put(number, record)
            else:
                self.tally.skip("a time far from that of all other lines", number)

    def _forget_ahead(self) -> None:
        for number, record in self.ahead:
            if not isinstance(record, BadLine):
                self.tally.skip("a time far from that of all other lines", number)
        self.ahead.clear()


def in_order(records: Iterator[Numbered], tally: ParseStats) -> Iterator[Any_ | BadLine]:
    """The records in the order of time (of lines, where it is the same). Those far out of it are counted."""
    first = list(islice(records, CONFIRMED_BY))
    if not first:
        return
    middle = median(record.t for _, record in first)
    order = _Order(tally, newest=middle, floor=max(0.0, middle - LEAP_S))
    for number, record in chain(first, records):
        yield from order.put(number, record)
    yield from order.end()


def moments(records: Iterable[Any_ | BadLine]) -> Iterator[Moment]:
    """Records that are in order, together with those of the same moment."""
    now: Moment | None = None
    begun_at = 0.0
    for record in records:
        if now is None or record.t - begun_at >= MOMENT_S:
            if now is not None:
                yield now
            begun_at = record.t
            now = Moment(begun_at)
        now.records.append(record)
        now.t = record.t
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
