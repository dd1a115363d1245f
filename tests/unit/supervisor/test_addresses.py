"""IP addresses of the job's nodes: few names, in little time, once."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from slurm_watchdog.supervisor.allocation import Allocation
from slurm_watchdog.supervisor.launcher import MAX_NAMES, read_addresses, usable
from slurm_watchdog.supervisor.placement import Addresses

NODES = tuple(f"n{number}" for number in range(1, 101))
JOB = Allocation(job_id="1", nodes=NODES)
WRITTEN = {"MASTER_ADDR": "10.0.0.1"}


def answer(node: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
    if node == "n2":
        raise socket.gaierror("no such name")
    return [(socket.AF_INET, 1, 6, "", (f"10.0.0.{node[1:]}", 0))]


def test_first_nodes_are_resolved_and_a_name_that_is_none_has_no_address() -> None:
    found = read_addresses(["srun"], JOB, WRITTEN, resolve=answer)
    assert found.node_of["10.0.0.1"] == "n1"
    assert found.of_node["n3"] == ("10.0.0.3",)
    assert set(found.of_node) == {*NODES[:MAX_NAMES]} - {"n2"}


def test_nothing_is_asked_where_the_script_writes_names() -> None:
    asked: list[str] = []

    def never(node: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        asked.append(node)
        return []

    assert read_addresses(["srun"], JOB, {"MASTER_ADDR": "n1"}, resolve=never) == Addresses()
    assert not asked


def test_a_resolver_that_hangs_is_waited_for_once_and_for_all_names_together() -> None:
    release = threading.Event()

    def hangs(node: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if node != "n1":
            release.wait(30)
        return answer(node)

    begun = time.monotonic()
    found = read_addresses(["srun"], JOB, WRITTEN, resolve=hangs, deadline_s=0.2)
    release.set()
    assert time.monotonic() - begun < 5
    assert found.of_node == {"n1": ("10.0.0.1",)}


def test_this_nodes_addresses_in_all_its_networks_are_its_own() -> None:
    here = Allocation(job_id="1", nodes=("n1", "n2"), batch_host="n1")
    found = read_addresses(["srun"], here, WRITTEN, resolve=answer)
    assert set(found.node_of.values()) == {"n1"}
    assert not {"127.0.0.1", "::1"} & found.node_of.keys()


def test_loopback_and_link_local_addresses_lead_nowhere() -> None:
    assert usable(["127.0.1.1", "::1", "fe80::1%eth0", "10.0.0.1", "10.0.0.1", "fd00::1"]) == ("10.0.0.1", "fd00::1")
