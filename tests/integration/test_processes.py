"""Looking at processes that cannot be looked at: a held memory lock, a child stuck in execve, a PID namespace
of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import Process, Role
from tests.builders.readers import reader, serving
from tests.memory_lock import MemoryLockHolder, is_memory_locked
from tests.rig.cluster import Cluster
from tests.rig.filesystems import set_frozen

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: loop devices, fsfreeze, namespaces")

JOB = "990702"
DEADLINE_S = 0.6
INTERVAL_S = 0.1


def environment(rank: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "4"}


@pytest.fixture
def filesystem(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own, mounted; it answers again when the test is over."""
    image, point = tmp_path / "image.ext4", Path(tempfile.mkdtemp(prefix="slurm-watchdog-test-"))
    with open(image, "wb") as file:
        file.truncate(64 * 1024**2)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=180)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, timeout=180)
    yield point
    set_frozen(point, False)
    for _ in range(50):
        if subprocess.run(["umount", str(point)], capture_output=True, timeout=180).returncode == 0:
            break
        time.sleep(0.1)
    point.rmdir()


class Looks:
    """Ticks of the collector, each of which has to come back."""

    def __init__(self) -> None:
        self.collector = reader({JOB: os.getuid()})
        self.children = self.collector.looks.children
        self.started: list[subprocess.Popen[bytes]] = []
        self.watched: set[int] = set()

    def tick(self) -> dict[int, Process]:
        time.sleep(INTERVAL_S)
        began = clock.monotonic()
        self.children.poll(began)
        processes = self.collector.collect(began, DEADLINE_S)
        assert clock.monotonic() - began < 5.0, "a look that blocks"
        return {process.pid: process for process in processes if process.job_id == JOB}

    def until(self, condition: Callable[[dict[int, Process]], object], ticks: int = 60) -> dict[int, Process]:
        for _ in range(ticks):
            processes = self.tick()
            if condition(processes):
                return processes
        pytest.fail(f"not within {ticks} ticks: {processes}, hung: {self.hung()}")

    def hung(self) -> list[str]:
        """Names of the children that hang, but for those on processes of this machine that no test here started."""
        names = sorted(probe.probe for probe in self.children.hung(clock.monotonic()))
        return [name for name in names if not name[-1].isdigit() or int(name.rpartition(":")[2]) in self.watched]

    def rank(self, rank: int, *argv: str) -> int:
        command = argv or (sys.executable, "-c", "import time; time.sleep(100)")
        process = subprocess.Popen(command, env={**os.environ, **environment(rank)})
        self.started.append(process)
        return process.pid


@pytest.fixture
def looks() -> Iterator[Looks]:
    with serving(os.getuid()):
        looks = Looks()
        yield looks
        for process in looks.started:
            process.kill()
            process.wait(timeout=180)
        looks.children.close()
        looks.collector.table.close()


def test_one_held_memory_lock_keeps_nobody_else_from_being_identified(looks: Looks, filesystem: Path) -> None:
    looks.tick()
    with MemoryLockHolder(filesystem / "mapped", environment(0)) as holder:
        set_frozen(filesystem, True)
        holder.take()
        looks.watched.add(holder.pid)
        others = {looks.rank(rank) for rank in (1, 2, 3)}
        found = looks.until(lambda found: others <= found.keys() and looks.hung())
        assert {found[pid].rank for pid in others} == {1, 2, 3}
        assert looks.hung() == [f"look:0:{holder.pid}"]
        late = looks.rank(4)
        looks.until(lambda found: late in found)
        for _ in range(10):  # and it stays one child, however long it lasts
            looks.tick()
        assert looks.hung() == [f"look:0:{holder.pid}"]
        assert is_memory_locked(holder.pid)
        set_frozen(filesystem, False)
        found = looks.until(lambda found: holder.pid in found, ticks=300)
        assert (found[holder.pid].role, found[holder.pid].rank) == (Role.RANK, 0)
        assert looks.hung() == []


def test_a_rank_that_is_known_is_still_seen_with_its_memory_locked_and_its_thread_is_named(
    looks: Looks, filesystem: Path
) -> None:
    with MemoryLockHolder(filesystem / "mapped", environment(0)) as holder:
        looks.until(lambda found: holder.pid in found)
        set_frozen(filesystem, True)
        holder.take()
        looks.watched.add(holder.pid)
        found = looks.until(lambda found: found[holder.pid].blocked is not None)
        process = found[holder.pid]
        assert (process.role, process.state, process.threads) == (Role.RANK, "S", 3)
        assert process.blocked is not None
        assert process.blocked.state == "D"
        assert process.blocked.thread_id != holder.pid
        assert not [name for name in looks.hung() if name != f"look:0:{holder.pid}"]
        set_frozen(filesystem, False)


KILLED = (
    "import ctypes, os, platform, sys, threading, time\n"
    "file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
    "def write():\n"
    "    while True:\n"
    "        os.write(file, b'x')\n"
    "        time.sleep(0.05)\n"
    "threading.Thread(target=write, daemon=True).start()\n"
    "while not os.path.exists(sys.argv[2]):\n"
    "    time.sleep(0.05)\n"
    "EXIT = {'x86_64': 60, 'aarch64': 93}[platform.machine()]\n"
    "ctypes.CDLL(None).syscall(EXIT, 0)\n"
)
"""Its main thread ends alone (exit(2), not exit_group(2)), as that of a killed process whose other thread cannot."""


def test_rank_whose_main_thread_has_ended_is_followed_into_the_call_of_its_other_thread(
    looks: Looks, filesystem: Path, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    pid = looks.rank(3, sys.executable, "-c", KILLED, str(filesystem / "log"), str(end))
    looks.until(lambda found: pid in found and (found[pid].rank, found[pid].threads) == (3, 2))
    set_frozen(filesystem, True)
    end.touch()
    found = looks.until(lambda found: found[pid].state == "Z" and found[pid].blocked is not None)
    call = found[pid].blocked
    assert (found[pid].role, found[pid].rank, found[pid].threads) == (Role.RANK, 3, 2)
    assert call is not None and call.thread_id != pid
    assert (call.state, call.syscall, call.path) == ("D", "write", str(filesystem / "log"))
    found = looks.until(lambda found: found[pid].blocked is not None and found[pid].blocked.mount)
    assert found[pid].blocked is not None and found[pid].blocked.mount == str(filesystem)
    looks.started[-1].kill()  # it changes nothing: no signal ends a thread in D
    assert looks.tick()[pid].blocked is not None
    set_frozen(filesystem, False)
    looks.until(lambda found: pid not in found or found[pid].blocked is None)


STARTER = (
    "import subprocess, sys, time\n"
    "sys.argv[0] = {program!r}\n"
    "import runpy, threading\n"
    "def start():\n"
    "    {wait}\n"
    "    subprocess.Popen(['sleep', '99'])\n"
    "threading.Thread(target=start, daemon=True).start()\n"
    "runpy.run_path({program!r}, run_name='__main__')\n"
)


LATE_EXEC = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
static volatile char *page;
static char stack[1 << 16];
static void after(void *go, int seconds) { while (access(go, F_OK)) usleep(20000); sleep(seconds); }
static void *fault(void *go) { after(go, 0); page[0] = 1; return 0; }
static void *map(void *go) { after(go, 1); mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); return 0; }
static int late(void *go) { after(go, 2); execl("/bin/sleep", "sleep", "99", (char *)0); return 1; }
int main(int argc, char **argv) {
    pthread_t first, second;
    int fd = open(argv[1], O_RDWR | O_CREAT, 0600);
    if (ftruncate(fd, 4096)) return 1;
    page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pthread_create(&first, 0, fault, argv[2]);
    pthread_create(&second, 0, map, argv[2]);
    printf("%d\n", clone(late, stack + sizeof stack, CLONE_VM | SIGCHLD, argv[2])); fflush(stdout);
    for (;;) pause();
}
"""
"""A process that is met, and then waits in execve for its memory, whose lock a page fault of its parent's holds (N0)."""


def test_a_process_that_is_known_and_enters_execve_behind_a_held_lock_stops_no_look(
    looks: Looks, filesystem: Path, tmp_path: Path
) -> None:
    (tmp_path / "late.c").write_text(LATE_EXEC)
    program, go = str(tmp_path / "python3"), tmp_path / "go"
    subprocess.run(["cc", "-O1", "-pthread", "-o", program, str(tmp_path / "late.c")], check=True, timeout=60)
    parent = subprocess.Popen(
        [program, str(filesystem / "mapped"), str(go)], env={**os.environ, **environment(0)}, stdout=subprocess.PIPE
    )
    looks.started.append(parent)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    looks.watched |= {parent.pid, child}
    looks.until(lambda found: {parent.pid, child} <= found.keys())
    set_frozen(filesystem, True)
    go.touch()
    time.sleep(3.0)
    assert is_memory_locked(parent.pid)
    other = looks.rank(7)
    try:
        found = looks.until(lambda found: other in found and looks.hung(), ticks=100)
        assert found[child].comm in ("python3", "sleep") and len(looks.hung()) <= 2
        for _ in range(10):
            found = looks.tick()
        assert {parent.pid, child, other} <= found.keys(), "it is there, whatever is not known of it"
    finally:
        set_frozen(filesystem, False)
        os.kill(child, 9)
        parent.kill()
        parent.wait(20)
    looks.until(lambda found: (child not in found or found[child].state == "Z") and not looks.hung())


def children_of(pid: int) -> set[int]:
    """By `status`, which never blocks."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                text = Path(f"/proc/{name}/status").read_text()
            except OSError:
                continue
            if f"\nPPid:\t{pid}\n" in text:
                found.add(int(name))
    return found


def test_a_child_that_waits_in_execve_for_a_locked_memory_stops_no_look(
    looks: Looks, filesystem: Path, tmp_path: Path
) -> None:
    looks.tick()
    program = str(Path(__file__).resolve().parents[1] / "memory_lock.py")
    go = tmp_path / "go"
    wait = f"import os\n    while not os.path.exists({str(go)!r}): time.sleep(0.05)"
    argv = [sys.executable, "-c", STARTER.format(program=program, wait=wait), str(filesystem / "mapped")]
    parent = subprocess.Popen(argv, env={**os.environ, **environment(0)}, stdout=subprocess.PIPE)
    looks.started.append(parent)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    looks.until(lambda found: parent.pid in found)
    set_frozen(filesystem, True)
    os.kill(parent.pid, 10)
    for _ in range(100):
        if is_memory_locked(parent.pid):
            break
    go.touch()  # now its thread starts a child, which shares the locked memory until its execve is done
    for _ in range(100):
        if children_of(parent.pid):
            break
        time.sleep(0.05)
    (child,) = children_of(parent.pid)
    looks.watched |= {parent.pid, child}
    try:
        late = looks.rank(5)
        looks.until(lambda found: late in found)
        found = looks.until(lambda _: looks.hung() == [f"look:0:{child}"])
        for _ in range(10):
            found = looks.tick()
        assert looks.hung() == [f"look:0:{child}"]
        assert found[parent.pid].role is Role.RANK
        assert child not in found
        set_frozen(filesystem, False)
        found = looks.until(lambda found: child in found and found[child].comm == "sleep")
        assert found[child].job_id == JOB
        assert looks.hung() == []
    finally:
        set_frozen(filesystem, False)
        parent.stdout.close()
        os.kill(child, 9)
        parent.kill()
        parent.wait(timeout=180)


def test_ranks_in_a_pid_namespace_are_ranks_and_carry_their_number_in_there(looks: Looks) -> None:
    outer = looks.rank(
        3, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
        f"{sys.executable} -c 'import time; time.sleep(100)'; true",
    )  # fmt: skip
    found = looks.until(lambda found: any(process.role is Role.RANK for process in found.values()))
    (rank,) = [process for process in found.values() if process.role is Role.RANK]
    assert found[outer].role is Role.HELPER
    assert (rank.rank, rank.world_size) == (3, 4)
    assert rank.pid != outer
    assert rank.container_pid is not None
    assert 1 < rank.container_pid < 10
    assert found[outer].container_pid is None


def test_a_stopped_rank_says_since_when(looks: Looks) -> None:
    pid = looks.rank(0)
    looks.until(lambda found: pid in found and found[pid].role is Role.RANK)
    os.kill(pid, 19)
    found = looks.until(lambda found: (found[pid].state_age_s or 0) > 3 * INTERVAL_S)
    assert found[pid].state == "T"
    os.kill(pid, 18)
    found = looks.until(lambda found: found[pid].state == "S")
    assert found[pid].state_age_s is None
    assert (found[pid].threads, found[pid].container_pid) == (1, None)


def test_checkpoint_directories_and_working_directory_come_from_the_command_line(looks: Looks, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)", "--save", "ckpt/run1"],
        env={**os.environ, **environment(0)}, cwd=tmp_path,
    )  # fmt: skip
    looks.started.append(process)
    looks.until(lambda found: process.pid in found and found[process.pid].role is Role.RANK)
    assert looks.collector.checkpoint_directories_of(JOB) == (f"{tmp_path}/ckpt/run1",)
    assert looks.collector.working_directory_of(JOB) == str(tmp_path)
    assert looks.collector.checkpoint_directories_of("1") == ()


QUIET = """
import os, subprocess
from slurm_watchdog.agent.proc.table import LIST_AT_LEAST_EVERY, ProcessTable
listed = 0
real = os.listdir
def listdir(path):
    global listed
    listed += path == "/proc"
    return real(path)
os.listdir = listdir
table = ProcessTable()
for tick in range(2 * LIST_AT_LEAST_EVERY):
    table.look(float(tick), 20)
print(listed, len(table.entries))
child = subprocess.Popen(["sleep", "99"])
table.look(100.0, 20)
print(child.pid in table.entries)
child.kill()
child.wait()
for tick in range(LIST_AT_LEAST_EVERY + 1):
    table.look(101.0 + tick, 20)
print(child.pid in table.entries)
"""


def test_proc_is_listed_when_something_was_started_and_otherwise_seldom() -> None:
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", QUIET],
        capture_output=True, text=True, timeout=180, check=True, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.stdout.split() == ["2", "1", "True", "False"]


LOOK = """
import json, time
from slurm_watchdog.base import clock
from slurm_watchdog.agent.processes.reader import ProcessReader
from slurm_watchdog.agent.tasks import TASKS
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.base.mounts import read_mounts
from slurm_watchdog.agent.children.children import Children
probes = Children(TASKS)
collector = ProcessReader(UserLooks(probes, ProcessTable()), read_mounts)
for _ in range(3):
    processes = collector.collect(clock.monotonic(), 5.0)
    time.sleep(0.3)
print(json.dumps([[p.job_id, p.role, p.rank, p.local_rank, p.world_size, p.comm, p.container_pid, p.uid] for p in processes]))
collector.looks.children.close()
"""
CONTAINER = "unshare --user --map-root-user --pid --fork --kill-child --mount-proc"
"""As enroot, pyxis and apptainer do it: the user is root in there, and himself for the host."""


def test_ranks_of_a_real_step_in_containers_namespaces_are_found_from_the_host(cluster: Cluster) -> None:
    trainer = "perl -e 'if (fork() == 0) { sleep 300 } sleep 300'"
    program = cluster.shared / "rank.sh"
    program.write_text(f'{CONTAINER} sh -c "{trainer}; true"\n')
    script = f"#!/bin/sh\nsrun --nodes=1 --ntasks=2 sh -c '. {program}; true'\n"
    job_id = cluster.sbatch(script, "--nodelist=n1", "--ntasks=2", "--output=/dev/null")
    ranks: list[list[Any]] = []
    mine: list[list[Any]] = []
    for _ in range(20):
        done = cluster.node_run("n1", [sys.executable, "-c", LOOK], cwd=Path(__file__).resolve().parents[2])
        mine = [row for row in json.loads(done.stdout) if row[0] == job_id]
        ranks = sorted(row for row in mine if row[1] == "rank")
        if len(ranks) == 2 and sum(row[1] == "worker" for row in mine) == 2:
            break
    assert [row[2:6] for row in ranks] == [[0, 0, 2, "perl"], [1, 1, 2, "perl"]], mine
    assert all(1 < row[6] < 10 for row in ranks)
    assert sorted((row[2], row[5]) for row in mine if row[1] == "worker") == [(0, "perl"), (1, "perl")]
    assert {row[5] for row in mine if row[1] == "helper"} >= {"srun", "unshare", "sh"}
    cluster.slurm("scancel", job_id)
