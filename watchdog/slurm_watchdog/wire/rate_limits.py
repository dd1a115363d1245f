"""How much of a port one address or node may take: connections, failures to prove who it is, frames and bytes.

Bounded: forgotten addresses are allowed.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

MAX_CONNECTIONS = 32_768  # Three for each of ten thousand agents: one that was lost counts until it is swept.
SPARE_FILES = 512  # Descriptors for the rest of the controller: journal, Slurm's commands, socket, page, users.
MAX_OF_ONE_ADDRESS = 64  # An agent holds one, Prometheus another; a login node may run a few agents of users.
MAX_NAMES = 65_536  # Addresses and nodes that are remembered.
MAX_UNREAD = 4 * 1024**2  # Bytes of answers that a client has not read; beyond, the connection is closed.
MAX_HELD = 512 * 1024**2  # Bytes of all requests that have begun to arrive: 50 KiB of each of ten thousand agents.

CONNECTION_REASONS = {
    "no_certificate": "it showed no certificate",
    "expired": "its certificate has expired",
    "bad_certificate": "its certificate is not good",
    "no_tls": "it does not use TLS: does `controller` begin with https:// ?",
    "handshake": "the TLS handshake failed",
    "slow_handshake": "its TLS handshake took too long",
    "another_user": "the process at its end belongs to another user",
    "too_many": "there are too many connections already",
    "too_many_of_one_address": "it has too many connections already",
    "too_many_failures": "it has failed too often",
}  # Label of a connection that was refused -> what it means. These are all the labels there are.


@lru_cache(maxsize=MAX_NAMES)
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
    most_names: int = MAX_NAMES
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


@dataclass
class Limits:
    """The connections of one port. Addresses of this machine are bounded by the total only: tunnels and tests end
    there. So are all where `by_address` is off: behind address translation one address is many nodes."""

    by_address: bool = True
    is_own: Callable[[str], bool] = is_loopback  # Whether an address is this machine's.
    most: int = field(default_factory=most_connections)
    most_of_one: int = MAX_OF_ONE_ADDRESS
    held_bytes: int = MAX_HELD
    unread_bytes: int = MAX_UNREAD
    _open: Counter[str] = field(default_factory=Counter)
    _failures: TokenBuckets = field(default_factory=lambda: TokenBuckets(burst=20, per_s=1 / 3))
    """A handshake costs us a millisecond: after twenty failures an address has to wait 3 s for each further try."""
    total: int = 0

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
