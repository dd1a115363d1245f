"""IP addresses of the job's nodes: a script may have written rank 0's host as one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final

import psutil

from slurm_watchdog.base import clock
from slurm_watchdog.supervisor.allocation import Allocation
from slurm_watchdog.supervisor.placement import NOT_ASKED, Addresses, mentions_address

ANSWER_S: Final = 2.0
"""For all names together: a resolver that hangs holds up the first start by no more."""
MAX_NAMES: Final = 16
"""Rank 0 is on one of the first nodes, and after a restart on one of the next: for another its name is written."""

Resolve = Callable[..., Sequence[tuple[Any, ...]]]


def read_addresses(
    command: Sequence[str], allocation: Allocation, environ: Mapping[str, str], *,
    resolve: Resolve = socket.getaddrinfo, deadline_s: float = ANSWER_S,
) -> Addresses:  # fmt: skip
    """Of the first nodes and of this one; nothing where the script has written no address. Waits `deadline_s` seconds
    at most: a name that is not resolved by then has none."""
    if not mentions_address(command, environ):
        return NOT_ASKED
    found: dict[str, tuple[str, ...]] = {}

    def ask(node: str) -> None:
        try:
            answers = resolve(node, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        found[node] = usable(str(answer[4][0]) for answer in answers)

    # Threads that nobody waits for: getaddrinfo(3) cannot be ended.
    threads = [threading.Thread(target=ask, args=(node,), daemon=True) for node in allocation.nodes[:MAX_NAMES]]
    for thread in threads:
        thread.start()
    end = clock.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - clock.monotonic()))
    of_node = dict(found)
    node_of = {address: node for node, addresses in of_node.items() for address in addresses}
    if allocation.batch_host in allocation.nodes:
        # Of all its networks; its own name may mean 127.0.1.1 here.
        node_of |= dict.fromkeys(_own_addresses(), allocation.batch_host)
    return Addresses(node_of, of_node)


def usable(texts: Iterable[str]) -> tuple[str, ...]:
    """Addresses by which another node may come, each once, in their order."""
    found = [ip_address(text.partition("%")[0]) for text in texts]
    return tuple(dict.fromkeys(str(each) for each in found if not each.is_loopback and not each.is_link_local))


def _own_addresses() -> tuple[str, ...]:
    families = (socket.AF_INET, socket.AF_INET6)
    return usable(
        each.address for network in psutil.net_if_addrs().values() for each in network if each.family in families
    )
