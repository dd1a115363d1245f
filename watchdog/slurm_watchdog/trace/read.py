"""From bytes to moments: lines of bounded length, records in the order of time, records of one moment together. Pure.

A trace is read as a stream; what is kept at once are the records of some seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from slurm_watchdog.base.averages import median
from slurm_watchdog.trace.records import (
    MAX_LINE_BYTES,
    Any_,
    BadLine,
    Gpu,
    ParseStats,
    Proc,
    Report,
    parse_record,
    parse_records,
)

CHUNK_BYTES = 1 << 18
BOM = b"\xef\xbb\xbf"
WINDOW_S = 10.0  # Records may be so much out of order: two report intervals.
LEAP_S = 86400.0  # A line this far ahead of all others is believed only if others follow it there.
CONFIRMED_BY = 20  # Lines that make a leap believed, and that say where the trace begins.
MOMENT_S = 0.5  # Records of this time belong together: agents do not report more often.

Numbered = tuple[float, int, "Any_ | BadLine"]  # (time, line number, record).


@dataclass
class Moment:
    """What was said at about the same time. `t` is that of its last record."""

    t: float
    records: list[Any_ | BadLine] = field(default_factory=list)


def read_blocks(read: Callable[[int], bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(number of the first line, whole lines without the last one's end), block after block; None for one
    line that is too long."""
    number, pending, too_long = 1, b"", False
    while chunk := read(CHUNK_BYTES):
        block, end, pending = (pending + chunk).rpartition(b"\n")
        if end:
            if too_long:
                yield number, None
                number, too_long = number + 1, False
                _, end, block = block.partition(b"\n")
            if end:
                yield number, block
                number += block.count(b"\n") + 1
        if too_long or len(pending) > MAX_LINE_BYTES:
            pending, too_long = b"", True
    if too_long or pending:
        yield number, None if too_long else pending


def read_records(blocks: Iterable[tuple[int, bytes | None]], tally: ParseStats) -> Iterator[list[Numbered]]:
    """The records of these lines as they stand; a damaged line is dated like the one before it."""
    last_t = 0.0
    for number, block in blocks:
        found = None if block is None else _all_of(block, number)
        if found is None:
            found = list(_line_by_line(number, block, last_t, tally))
        else:
            tally.lines += len(found)
        if found:
            last_t = found[-1][0]
            yield found


def _all_of(block: bytes, number: int) -> list[Numbered] | None:
    """The records of a block of which every line is as it should be, as nearly all are; None: it has to be
    read line by line."""
    if len(block) > MAX_LINE_BYTES:
        return None
    records = parse_records(block)
    if records is None or len(records) != block.count(b"\n") + 1:
        return None
    return [(record.t, number, record) for number, record in enumerate(records, number)]


def _line_by_line(number: int, block: bytes | None, last_t: float, tally: ParseStats) -> Iterator[Numbered]:
    for number, line in enumerate([None] if block is None else block.split(b"\n"), number):  # noqa: B020
        if line is None or len(line) > MAX_LINE_BYTES:
            tally.lines += 1
            tally.skip(f"longer than {MAX_LINE_BYTES} bytes", number)
            record: Any_ | BadLine | None = BadLine(t=0.0)
        elif stripped := line.strip():
            tally.lines += 1
            record = parse_record(stripped.removeprefix(BOM), number, tally)
        else:
            continue
        if type(record) is BadLine:
            record.t = last_t
        elif record is not None:
            last_t = record.t
        if record is not None:
            yield record.t, number, record


@dataclass
class _Order:
    """Puts records in the order of time, within a window, and leaves out those whose time can't be."""

    tally: ParseStats
    newest: float
    floor: float
    waiting: list[Numbered] = field(default_factory=list)
    ahead: list[Numbered] = field(default_factory=list)

    def put_all(self, batch: list[Numbered]) -> Iterator[list[Numbered]]:
        """Takes a batch; gives what cannot be overtaken any more."""
        if self._is_plain(batch):
            self.waiting += batch
            self.newest = max(self.newest, batch[-1][0])
            if self.newest - self.floor > 3 * WINDOW_S:
                yield self.ready_before(self.newest - WINDOW_S)
            return
        for each in batch:
            yield from self._put(each)

    def _is_plain(self, batch: list[Numbered]) -> bool:
        """Whether it is in order, and lies where a batch should: nearly all do."""
        first, last = batch[0][0], batch[-1][0]
        if self.ahead or first < self.floor or last > self.newest + LEAP_S:
            return False
        return all(a[0] <= b[0] for a, b in pairwise(batch))

    def _put(self, each: Numbered) -> Iterator[list[Numbered]]:
        t = each[0]
        if t > self.newest + LEAP_S:
            self.ahead.append(each)
            if len(self.ahead) >= CONFIRMED_BY:
                yield from self._leap()
            return
        if self.ahead and not isinstance(each[2], BadLine):
            self._forget_ahead()
        if t < self.floor:
            if not isinstance(each[2], BadLine):
                self.tally.skip("the time goes back", each[1])
            return
        self.waiting.append(each)
        if t > self.newest:
            self.newest = t
            if t - self.floor > 3 * WINDOW_S:
                yield self.ready_before(t - WINDOW_S)

    def ready_before(self, until: float) -> list[Numbered]:
        """What is older than `until`, in order."""
        self.waiting.sort(key=itemgetter(0, 1))
        count = bisect_left(self.waiting, until, key=itemgetter(0))
        ready, self.waiting = self.waiting[:count], self.waiting[count:]
        self.floor = max(self.floor, until)
        self.tally.used += sum(1 for _, _, record in ready if type(record) is not BadLine)
        return ready

    def end(self) -> list[Numbered]:
        self._forget_ahead()
        return self.ready_before(float("inf"))

    def _leap(self) -> Iterator[list[Numbered]]:
        """The trace continues at another time: where most of the lines are."""
        yield self.ready_before(float("inf"))
        group, self.ahead = self.ahead, []
        self.newest = median(t for t, _, _ in group)
        self.floor = self.newest - LEAP_S
        for each in group:
            if abs(each[0] - self.newest) <= LEAP_S:
                yield from self._put(each)
            else:
                self.tally.skip("a time far from that of all other lines", each[1])

    def _forget_ahead(self) -> None:
        for _, number, record in self.ahead:
            if not isinstance(record, BadLine):
                self.tally.skip("a time far from that of all other lines", number)
        self.ahead.clear()


def in_order(batches: Iterable[list[Numbered]], tally: ParseStats) -> Iterator[list[Numbered]]:
    """The records in the order of time (of lines, where it is the same). Those far out of order are skipped
    and counted."""
    order: _Order | None = None
    first: list[Numbered] = []
    for batch in batches:
        if order is None:
            first += batch
            if len(first) < CONFIRMED_BY:
                continue
            order, batch = _begin(first, tally), first
        yield from order.put_all(batch)
    if order is None and first:
        order = _begin(first, tally)
        yield from order.put_all(first)
    if order is not None:
        yield order.end()


def _begin(first: list[Numbered], tally: ParseStats) -> _Order:
    middle = median(t for t, _, _ in first[:CONFIRMED_BY])
    return _Order(tally, newest=middle, floor=max(0.0, middle - LEAP_S))


def moments(batches: Iterable[list[Numbered]]) -> Iterator[Moment]:
    """Records that are in order, together with those of the same moment."""
    now: Moment | None = None
    begun_at = 0.0
    for batch in batches:
        place = 0
        while place < len(batch):
            if now is None or batch[place][0] - begun_at >= MOMENT_S:
                if now is not None:
                    yield now
                begun_at = batch[place][0]
                now = Moment(begun_at)
            end = max(place + 1, bisect_left(batch, begun_at + MOMENT_S, place, key=itemgetter(0)))
            now.records += [record for _, _, record in batch[place:end]]
            now.t, place = batch[end - 1][0], end
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
