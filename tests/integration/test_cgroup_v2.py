"""Control groups of version 2: a real step with a limit, made where slurmstepd makes it, and a real kill in it.

The kernels of the build machines have memory in version 1; `tests/other_kernel.sh` boots one that has it in version 2.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_watchdog.agent.collectors.usage import read_usage
from slurm_watchdog.model.observations import Resource, Usage
from tests.builders.views import process

ROOT = Path("/sys/fs/cgroup")
LIMIT = 96 << 20
EATS = "import sys; sys.stdin.read(1); kept = [b'x' * (1 << 20) for _ in range(int(sys.argv[1]))]; sys.stdin.read()"


def has_memory() -> bool:
    """Whether memory is counted in version 2 here, and groups can be made."""
    with suppress(OSError):
        return "memory" in (ROOT / "cgroup.controllers").read_text().split() and os.access(ROOT, os.W_OK)
    return False


pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(not has_memory(), reason="memory is not in version 2 here: tests/other_kernel.sh"),
]


@pytest.fixture
def task() -> Iterator[Path]:
    """The group of a task of job 4711, as slurmstepd nests it; its step has the limit, and its job twice that."""
    place, made = ROOT, []
    for name in ("system.slice", "n1_slurmstepd.scope", "job_4711", "step_0", "user", "task_0"):
        with suppress(OSError):
            (place / "cgroup.subtree_control").write_text("+memory +pids")
        place = place / name
        if not place.exists():
            place.mkdir()
            made.append(place)
    step = place.parents[1]
    for group, limit in ((step, LIMIT), (step.parent, 2 * LIMIT)):
        (group / "memory.max").write_text(str(limit))
        with suppress(OSError):
            (group / "memory.swap.max").write_text("0")
    yield place
    for each in reversed(made):
        for pid in (each / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (ROOT / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            each.rmdir()


def eater(task: Path, mib: int) -> subprocess.Popen:
    """A process in the group that takes so much memory when it is given a byte."""
    child = subprocess.Popen([sys.executable, "-S", "-c", EATS, str(mib)], stdin=subprocess.PIPE)
    (task / "cgroup.procs").write_text(str(child.pid))
    return child


def seen(pid: int) -> dict[tuple[str | None, Resource], Usage]:
    """What the agent reads of the job's groups."""
    found = read_usage([process(0, pid=pid, job_id="4711")]).usages
    return {(each.step_id, each.resource): each for each in found if each.job_id == "4711"}


def test_a_step_near_its_limit_is_seen_with_its_use(task: Path) -> None:
    child = eater(task, 80)
    try:
        assert child.stdin is not None
        child.stdin.write(b"x")
        child.stdin.flush()
        end = time.monotonic() + 60
        while (step := seen(child.pid)["0", Resource.MEMORY]).ratio <= 0.8 and time.monotonic() < end:
            time.sleep(0.2)
        assert (step.limit, step.refused) == (LIMIT, 0) and 0.8 < step.ratio <= 1.0
        whole = seen(child.pid)[None, Resource.MEMORY]
        assert (whole.limit, whole.refused) == (2 * LIMIT, 0) and whole.used >= step.used
        print(f"step {step.used >> 20} of {step.limit >> 20} MiB, job {whole.used >> 20} of {2 * LIMIT >> 20} MiB")
    finally:
        child.kill()
        child.wait()


def test_a_kill_is_counted_for_the_step_and_the_job(task: Path) -> None:
    beside = eater(task, 1)
    try:
        assert seen(beside.pid)["0", Resource.MEMORY].refused == 0
        child = eater(task, 400)
        child.communicate(b"x")
        assert child.returncode == -9
        after = seen(beside.pid)
        assert [after[name, Resource.MEMORY].refused for name in ("0", None)] == [1, 1]
        assert after["0", Resource.MEMORY].by_limit is True
        peak = after["0", Resource.MEMORY].peak
        assert peak is None or peak >= 0.9 * LIMIT  # memory.peak: Linux 5.19
        pressures = read_usage([process(0, pid=beside.pid, job_id="4711")]).pressures
        assert {each.resource for each in pressures if each.job_id == "4711"} == {"cpu", "memory", "io"}
        print(f"killed: {after['0', Resource.MEMORY]}")
    finally:
        beside.kill()
        beside.wait()
