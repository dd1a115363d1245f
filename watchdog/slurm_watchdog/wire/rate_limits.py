"""How much of the agents' or the users' port one address may take: connections, and failures to prove who it is.

Bounded: forgotten addresses are allowed.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from slurm_watchdog.identity.tls import HANDSHAKE_REASONS

MAX_CONNECTIONS = 32_768  # Three for each of ten thousand agents: one that was lost counts until it is swept.
SPARE_FILES = 512  # Descriptors for the rest of the controller: journal, Slurm's commands, socket, page, users.
MAX_OF_ONE_ADDRESS = 64  # An agent holds one, Prometheus another; a login node may run a few agents of users.
MAX_ADDRESSES = 65_536  # Addresses and nodes that are remembered.

MAX_UNREAD = 4 * 1024**2  # Bytes of answers that a client has not read; beyond, the connection is closed.
MAX_HELD = 512 * 1024**2  # Bytes of all requests that have begun to arrive: 50 KiB of each of ten thousand agents.

CONNECTION_REASONS = {
    **HANDSHAKE_REASONS,
    "another_user": "the process at its end belongs to another user",
    "too_many": "there are too many connections already",
    "too_many_of_one_address": "it has too many connections already",
    "too_many_failures": "it has failed too often",
}  # Label of a connection that was refused -> what it means. These are all the labels there are.
LOST_STREAMS = {
    "reset": "it was reset: the agent has ended, or something between us",
    "closed_by_agent": "the agent closed it",
    "closed_by_us": "this controller ends",
    "silent": "no frame came in time: it is half-open, or the agent hangs",
    "replaced": "its node has begun another one",
    "slow_reader": "it does not read what it is sent",
}  # How streams of agents end that were not refused -> what it means.
REFUSED_REPORTS = (
    "unauthorized", "replayed", "wrong_node", "garbage", "too_large", "too_slow", "too_often",
    "cut_off", "busy", "no_munge", "wrong_job", "no_room", "standby", "failed", "old_agent",
)  # fmt: skip
"""Outcomes of requests that were refused; the others are those of reports that were taken."""


@lru_cache(maxsize=MAX_ADDRESSES)
def is_loopback(address: str) -> bool:
    """Whether it is an address of this machine itself; what is not an address is not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def most_connections() -> int:
    """As many as the limit of open files leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(MAX_CONNECTIONS, files - SPARE_FILES if files != resource.RLIM_INFINITY else MAX_CONNECTIONS))


@dataclass
class TokenBuckets:
    """A token bucket for each name: `burst` at once, then `per_s`; the one used longest ago is forgotten first."""

    burst: float
    per_s: float
    most_names: int = MAX_ADDRESSES
    _known: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # Name -> (tokens left, when).

    def acquire(self, name: str, now: float, cost: float = 1.0) -> bool:
        """Takes `cost`; False, and nothing is taken, where less is left."""
        left = self.left(name, now)
        self._known[name] = (left - cost if left >= cost else left, now)
        self._known.move_to_end(name)
        while len(self._known) > self.most_names:
            self._known.popitem(last=False)
        return left >= cost

    def left(self, name: str, now: float) -> float:
        """How many there are."""
        left, at = self._known.get(name, (self.burst, now))
        return min(self.burst, left + (now - at) * self.per_s)


REPORTS_AT_ONCE = 300  # Of an agent that was cut off: ten minutes at 5 s are 120, and each may be refused once.
REPORTS_A_SECOND = 20.0  # A hundred times what the default interval makes.
BYTES_AT_ONCE = 64 * 1024**2  # What an agent keeps (8 MiB), several times over.
BYTES_A_SECOND = 2 * 1024**2


@dataclass
class RateLimit:
    """How fast one sender may report: reports and bytes."""

    reports: TokenBuckets
    bytes: TokenBuckets = field(default_factory=lambda: TokenBuckets(BYTES_AT_ONCE, BYTES_A_SECOND))

    def acquire(self, name: str, size: int, now: float) -> bool:
        """Whether `name` may send a report of `size` bytes now."""
        return self.reports.acquire(name, now) and self.bytes.acquire(name, now, float(size))


def report_rate(interval_s: float) -> RateLimit:
    """For agents that report every `interval_s`: faster where a site asks for it."""
    return RateLimit(TokenBuckets(REPORTS_AT_ONCE, max(REPORTS_A_SECOND, 4.0 / interval_s)))


@dataclass
class Limits:
    """The connections of one port. Addresses of this machine are bounded by the total only: tunnels and tests
    end there.

    So are all where `by_address` is off: behind address translation one address is many nodes.
    """

    by_address: bool = True
    is_own: Callable[[str], bool] = is_loopback  # Whether an address is this machine's.
    most: int = field(default_factory=most_connections)
    most_of_one: int = MAX_OF_ONE_ADDRESS
    held_bytes: int = MAX_HELD
    unread_bytes: int = MAX_UNREAD
    total: int = 0
    _open: Counter[str] = field(default_factory=Counter)
    _failures: TokenBuckets = field(default_factory=lambda: TokenBuckets(burst=20, per_s=1 / 3))
    """A handshake costs us a millisecond: after twenty failures an address has to wait 3 s for each further try."""

    def opened(self, address: str, now: float) -> str:
        """Counts a connection; why it can't stay, or empty. Each one that was counted has to be `closed`."""
        self.total += 1
        self._open[address] += 1
        if self.total > self.most:
            return "too_many"
        if self.is_own(address) or not self.by_address:
            return ""
        if self._open[address] > self.most_of_one:
            return "too_many_of_one_address"
        return "too_many_failures" if self._failures.left(address, now) < 1.0 else ""

    def closed(self, address: str) -> None:
        self.total -= 1
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]

    def failed(self, address: str, now: float) -> None:
        """This address could not prove who it is, or made no sense."""
        if not self.is_own(address):
            self._failures.acquire(address, now)
