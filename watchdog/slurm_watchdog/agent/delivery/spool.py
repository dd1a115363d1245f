"""Reports that wait for the controller, encoded, within bounds of bytes and age."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_watchdog.wire.codec import with_age

NOTEWORTHY_AGE_S = 0.05  # Below this a report is as old as it was made.


@dataclass(frozen=True)
class Waiting:
    """One report that was encoded and not yet taken by the controller."""

    made_at: float
    sequence: int
    body: bytes
    is_state: bool = False  # See slurm_watchdog.wire.frames.

    def aged(self, now: float) -> bytes:
        """The body with the report's age."""
        age_s = now - self.made_at
        return self.body if age_s < NOTEWORTHY_AGE_S else with_age(self.body, age_s)


MAX_AGE_S = 600.0  # Far beyond the age that is still judged (`Config.report_lifetime_s`).

MAX_BYTES = 8 << 20  # While the controller is away: ten minutes of a node with 8 ranks.


@dataclass
class Spool:
    """Reports that wait, oldest first, bounded by bytes and by age: the oldest are dropped."""

    max_bytes: int = MAX_BYTES
    max_age_s: float = MAX_AGE_S
    dropped: int = 0
    size: int = 0
    _items: deque[Waiting] = field(default_factory=deque)

    def put(self, sequence: int, body: bytes, now: float, *, is_state: bool = False) -> None:
        """Adds a report that was made at `now`."""
        self._items.append(Waiting(now, sequence, body, is_state))
        self.size += len(body)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Drops what is too much, and what is too old, but never the newest."""
        while len(self._items) > 1 and (self.size > self.max_bytes or now - self._items[0].made_at > self.max_age_s):
            self.size -= len(self._items.popleft().body)
            self.dropped += 1

    def first(self) -> Waiting | None:
        """The oldest report; it stays until `done`."""
        return self._items[0] if self._items else None

    def done(self, sequence: int) -> None:
        """Forgets the oldest report if it is still the one with this sequence."""
        if self._items and self._items[0].sequence == sequence:
            self.size -= len(self._items.popleft().body)

    def left(self) -> tuple[Waiting, ...]:
        """All that waits, oldest first."""
        return tuple(self._items)

    def take_back(self, reports: Iterable[Waiting], now: float) -> None:
        """Begins with what an agent before this one has left."""
        self._items.extend(reports)
        self.size += sum(len(each.body) for each in self._items)
        self.expire(now)

    def __len__(self) -> int:
        return len(self._items)
