"""A rank that the kernel kills for memory, by a real control group with a limit: named before what follows from it.

The rig's Slurm has no control groups, so the rank is put into one of version 1 where slurmstepd would have made it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_watchdog.agent.collectors.usage import read_usage
from slurm_watchdog.model.observations import Resource, Usage
from tests.builders.views import process
from tests.integration.training_job import inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT = 96 << 20

pytestmark = [
    pytest.mark.exclusive,
    pytest.mark.skipif(
        not os.access(MEMORY / "memory.oom_control", os.W_OK) or not os.access("/dev/kmsg", os.R_OK),
        reason="needs root, control groups of version 1 with memory, and the kernel's log",
    ),
]


def rank_of(job: str, rank: int) -> int:
    """The process that trains as this rank: the first of those that have its number."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "environ").read_bytes().split(b"\0")
            mine = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
            if mine <= set(words) and b"trainer.py" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return min(found)


@pytest.fixture
def group() -> Iterator[Callable[[str], Path]]:
    made: list[Path] = []

    def make(job: str) -> Path:
        place = MEMORY
        for name in ("slurm", "uid_1000", f"job_{job}", "step_0", "task_1"):
            place = place / name
            if not place.exists():
                place.mkdir()
                made.append(place)
        (place.parent / "memory.limit_in_bytes").write_text(str(LIMIT))
        return place

    yield make
    for place in reversed(made):
        for pid in (place / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (MEMORY / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            place.rmdir()


def test_rank_that_the_kernel_kills_for_memory_is_named_before_the_cascade(
    cluster: Cluster, watch: Callable[..., Watchdog], group: Callable[[str], Path]
) -> None:
    watchdog = watch(mode="observe")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    (group(job) / "cgroup.procs").write_text(str(rank_of(job, 3)))
    inject(cluster, "memory.rank3")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "memory_kill"), 60, "the kill to be reported")
    culprit = incident["culprits"][0]  # all nodes of the rig read one kernel's log: the others know no such process
    assert (culprit["rank"], culprit["node"]) == (3, "n2")
    assert "killed by the kernel for memory" in incident["summary"], incident["summary"]
    print(incident["summary"])
    others = [each for each in watchdog.incidents() if each["kind"] in ("dead_rank", "log_error")]
    assert all(each["inhibited_by"] == incident["id"] for each in others), others


def test_real_groups_use_and_kills_are_read(group: Callable[[str], Path]) -> None:
    place = group("4711")
    eater = "import sys; sys.stdin.read(1); kept = [b'x' * (1 << 20) for _ in range(1000)]"
    child = subprocess.Popen([sys.executable, "-c", eater], stdin=subprocess.PIPE)
    rank = process(0, pid=child.pid, job_id="4711")

    def step() -> Usage:
        found = read_usage([rank]).usages
        (row,) = (each for each in found if each.job_id == "4711" and each.step_id == "0")
        return row

    try:
        (place / "cgroup.procs").write_text(str(child.pid))
        before = step()
        assert (before.resource, before.limit, before.refused) == (Resource.MEMORY, LIMIT, 0)
        assert child.stdin is not None
        with subprocess.Popen(["sleep", "30"]) as beside:  # so that somebody is there when the other one is not
            (place / "cgroup.procs").write_text(str(beside.pid))
            child.communicate(b"x")
            assert child.returncode == -9
            rank = process(0, pid=beside.pid, job_id="4711")
            after = step()
            beside.kill()
        assert after.refused == 1 and after.peak is not None and after.peak >= 0.9 * LIMIT
    finally:
        child.kill()
