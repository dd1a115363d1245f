"""A /dev/shm that a job has for itself is seen, and is the job's."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from slurm_watchdog.agent.children.requests import ReadSharedMemory, WorkerState
from slurm_watchdog.agent.collectors.usage import OLD_S, SHARED_EVERY_S, SharedMemories
from slurm_watchdog.agent.processes.open_mounts import read_shared_memory
from slurm_watchdog.model.observations import Process, Resource, Role, Usage
from tests.builders.fake_children import FakeChildren, looks

OWN = "mount -t tmpfs -o size=1m tmpfs /dev/shm && head -c 900000 /dev/zero > /dev/shm/x && echo && exec cat"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a mount namespace")
def test_full_shm_of_a_job_is_read_in_its_own_namespace_and_the_nodes_own_is_none() -> None:
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", OWN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as plain:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        asked = ReadSharedMemory([child.pid, plain.pid, 2**22 - 1])
        found = read_shared_memory(asked, WorkerState(os.getuid()))
        refused = read_shared_memory(asked, WorkerState(1000))
        child.communicate()
        plain.communicate()
    private, of_node, gone = found
    assert private is not None and private[1] == 1 << 20 and private[0] >= 900_000
    assert (of_node, gone) == (None, None)
    assert refused == [None, None, None], "another user's processes are not looked into"


def rank(pid: int, job_id: str = "7", step_id: str = "0", **more: Any) -> Process:
    given: dict[str, Any] = {"role": Role.RANK, "comm": "python", "state": "S", "uid": 1000, **more}
    return Process(pid=pid, start_ticks=1, job_id=job_id, step_id=step_id, **given)


def follow(answer: tuple[int, int] | None, seconds: int = 3600) -> tuple[list[float], tuple[Usage, ...]]:
    """When one step was asked about in so long, and what is reported at the end."""
    children = FakeChildren()
    memories = SharedMemories(looks(children))
    rows = [rank(8), rank(7), rank(9, role=Role.WORKER)]
    for second in range(0, seconds, 30):
        found = memories.collect(rows, 100.0 + second, 10.0)
        if children.busy:
            assert children.asked[-1]["pids"] == [7], "one rank of a step, always the same"
            children.answer([answer])
    return [each["at"] - 100.0 for each in children.asked], found


def test_job_with_its_own_is_asked_every_two_minutes_and_the_row_is_the_jobs() -> None:
    times, found = follow((900, 1000), 1200)
    assert times == [SHARED_EVERY_S * number for number in range(10)]
    assert found == (Usage(resource=Resource.SHARED_MEMORY, used=900, limit=1000, job_id="7", step_id="0"),)


def test_what_is_not_answered_any_more_and_what_is_of_a_job_that_is_gone_is_not_reported() -> None:
    children = FakeChildren()
    memories = SharedMemories(looks(children))
    memories.collect([rank(7)], 0.0, 10.0)
    children.answer([(5, 10)])
    assert memories.collect([rank(7)], 30.0, 10.0)
    assert memories.collect([rank(7)], SHARED_EVERY_S, 10.0), "asked again, no answer yet"
    assert memories.collect([rank(7)], OLD_S + 1.0, 10.0) == ()
    assert memories.collect([rank(9, job_id="8")], OLD_S + 31.0, 10.0) == ()
