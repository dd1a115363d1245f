"""IP addresses of the job's first node: one name, in little time."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from slurm_watchdog.supervisor.launcher import addresses


def answer(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
    found = ("127.0.1.1", "::1", "fe80::1%eth0", "10.0.0.1", "10.0.0.1", "fd00::1")
    return [(socket.AF_INET, 1, 6, "", (each, 0)) for each in found]


def unknown(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
    raise socket.gaierror("no such name")


def test_loopback_and_link_local_addresses_lead_nowhere_and_a_name_that_is_none_has_no_address() -> None:
    assert addresses("n1", here=False, resolve=answer) == {"10.0.0.1", "fd00::1"}
    assert addresses("n2", here=False, resolve=unknown) == set()


def test_a_resolver_that_hangs_is_not_waited_for() -> None:
    release = threading.Event()

    def hangs(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        release.wait(30)
        return []

    begun = time.monotonic()
    assert addresses("n1", here=False, resolve=hangs, deadline_s=0.2) == set()
    release.set()
    assert time.monotonic() - begun < 5


def test_this_nodes_addresses_in_all_its_networks_are_its_own() -> None:
    found = addresses("n1", here=True, resolve=answer)
    assert found >= {"10.0.0.1", "fd00::1"}
    assert not {"127.0.0.1", "::1"} & found
