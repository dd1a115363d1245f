"""From the kernel's facts to the events of one tick: how old they are, and the same thing told once.

Pure, but for what it remembers from tick to tick.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slurm_watchdog.model.observations import FaultSeverity
from slurm_watchdog.parse.kernel_log.line import KernelFact

MAX_EVENTS = 256
"""Events of one report. The first of each name is reported, and what is critical, even then."""
MAX_OF_A_NAME = 32
"""Different resources of one name in one report."""
MAX_DRIFT = 1e-3
"""Two clocks of one machine: NTP slews by at most 500 ppm (adjtimex(2)), a crystal is off by less than 100."""


@dataclass
class KernelClock:
    """How much must be added to the kernel's time stamps to have CLOCK_MONOTONIC.

    printk stamps with local_clock(), which NTP does not discipline: days after the boot it may be off by
    seconds. Two bounds are seen with each tick: a record that has been read is not from the future, and one
    that was not there when the log was last read to its end is younger than that.
    """

    offset_s: float = 0.0
    low: float = float("-inf")
    high: float = float("inf")
    at: float | None = None

    def learn(self, now: float, low: float, high: float) -> None:
        """Takes in that the offset is between `low` and `high` at `now`; what was learnt before becomes less
        certain with time."""
        drift = 0.0 if self.at is None else MAX_DRIFT * max(0.0, now - self.at)
        self.at = now
        self.low, self.high = max(self.low - drift, low), min(self.high + drift, high)
        if self.low > self.high:  # one of the clocks has jumped: the machine slept, or was moved
            self.low, self.high = min(low, high), high
        self.offset_s = min(max(self.offset_s, self.low), self.high)

    def age_s(self, now: float, time_us: int) -> float:
        """Age of a record at `now`; never negative."""
        return max(0.0, now - time_us / 1e6 - self.offset_s)


Resource = tuple[Any, ...]


@dataclass
class Reported:
    """One event of a tick, and how often it came again."""

    fact: KernelFact
    sequence: int
    time_us: int
    repeats: int = 0


@dataclass
class Deduplicator:
    """The events of one tick: the same thing of the same resource is reported once, with a count.

    What came back after something else had been said about its resource is reported a second time, as the last
    word on it: silent, OK, silent must not end with OK.
    """

    entries: dict[tuple[Resource, bool], Reported] = field(default_factory=dict)
    latest: dict[Resource, str] = field(default_factory=dict)
    of_a_name: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    dropped: int = 0

    def add(self, fact: KernelFact, sequence: int, time_us: int) -> None:
        """Takes in one fact, in the order of the log."""
        resource = (fact.pci_bus_id, fact.gpu, fact.server, fact.mount, fact.device, fact.pid)
        key = (fact.name, fact.xid, *resource)
        before = self.latest.get(resource, fact.name)
        if (key, False) not in self.entries:
            if not self._has_room(fact):
                self.dropped += 1
                return
            self.of_a_name[fact.name, fact.xid] += 1
            self.entries[key, False] = Reported(fact, sequence, time_us)
        elif before != fact.name:
            last = self.entries.get((key, True))
            repeats = 0 if last is None else last.repeats + 1
            self.entries[key, True] = Reported(fact, sequence, time_us, repeats)
        else:
            self.entries[key, (key, True) in self.entries].repeats += 1
        if any(resource):
            self.latest[resource] = fact.name

    def _has_room(self, fact: KernelFact) -> bool:
        told = self.of_a_name[fact.name, fact.xid]
        if told >= MAX_OF_A_NAME:
            return False
        return told == 0 or len(self.entries) < MAX_EVENTS or fact.severity is FaultSeverity.CRITICAL
