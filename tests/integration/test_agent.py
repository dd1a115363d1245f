"""The agent on real parts: a filesystem that stops answering, Python processes in D, ranks that a real srun started."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from slurm_watchdog.agent.agent import Agent
from slurm_watchdog.agent.settings import settings_of
from slurm_watchdog.base import clock, loop
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE, compose_line
from slurm_watchdog.model.observations import Blocked, EventKind, Process, Role
from slurm_watchdog.model.protocol import (
    CommandResult,
    DumpStacks,
    JobWatch,
    ProbeMount,
    RemoveKillSwitch,
    WriteKillSwitch,
)
from slurm_watchdog.model.report import Report
from tests.builders.report_json import report_of
from tests.rig.cluster import Cluster
from tests.rig.filesystems import set_frozen

CHECKOUT = Path(__file__).resolve().parents[2]
JOB = "990001"
USER = 64983
"""An ordinary one: as root nothing is read or written."""
PYTHON = "/usr/bin/python3"
"""Which he may run, too."""
INTERVAL_S = 0.3
CONFIG = "agent: {node_name: n1, probe_deadline: 2500ms, interval: 300ms, checkpoint_interval: 1s, state_directory: ''}"
WRITER = (
    "import os, sys, time\n"
    "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    "step = 0\n"
    "def log_iteration():\n"
    "    os.write(fd, b'iteration %8d/ 100000 | lm loss: 2.0\\n' % step)\n"
    "while True:\n"
    "    step += 1\n"
    "    log_iteration()\n"
    "    time.sleep(0.05)\n"
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: loop devices, fsfreeze, other users' processes")


@pytest.fixture
def filesystem(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own, mounted; it answers again when the test is over."""
    # Not below pytest's directory, which other users may not enter.
    image, point = tmp_path / "image.ext4", Path(tempfile.mkdtemp(prefix="slurm-watchdog-test-"))
    with open(image, "wb") as file:
        file.truncate(64 * 1024**2)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, timeout=60)
    point.chmod(0o777)
    yield point
    set_frozen(point, False)
    for _ in range(50):
        if subprocess.run(["umount", str(point)], capture_output=True, timeout=60).returncode == 0:
            break
        time.sleep(0.1)
    point.rmdir()


class Job:
    """Processes that look like ranks of a job, and an agent that looks at them."""

    def __init__(self, mount: Path) -> None:
        self.log = mount / "train.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        settings = settings_of(parse_config(CONFIG))
        prefixes = (str(mount),)
        self.agent = Agent(msgspec.structs.replace(settings, kill_switch_prefixes=prefixes))
        self.agent.jobs.hear([JobWatch(job_id=JOB, restarts=0, uid=USER)])

    def rank(self, rank: int, *command: str, uid: int = USER, talk: bool = False) -> int:
        environment = {
            "SLURM_JOB_ID": JOB,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
        }
        argv = command or (PYTHON, "-c", WRITER, str(self.log))
        pipe = subprocess.PIPE if talk else None
        process = subprocess.Popen(argv, env={**os.environ, **environment}, user=uid, stdin=pipe, stdout=pipe)
        self.processes.append(process)
        return process.pid

    def tick(self) -> Report:
        loop.sleep(INTERVAL_S)
        report = self.agent.tick(clock.monotonic())
        assert report.problems == ()
        return report

    def until(self, condition: Callable[[Report], bool], ticks: int = 100) -> Report:
        report = self.tick()
        for _ in range(ticks):
            if condition(report):
                return report
            report = self.tick()
        pytest.fail(f"not within {ticks} ticks; the last report: {report}")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.agent.close()


@pytest.fixture
def job(filesystem: Path) -> Iterator[Job]:
    os.makedirs(KILL_SWITCH_BASE, exist_ok=True)  # as systemd does
    job = Job(filesystem)
    yield job
    set_frozen(filesystem, False)
    job.close()


def find(report: Report, pid: int) -> Process:
    return next(process for process in report.processes if process.pid == pid)


def blocked(report: Report, pid: int) -> Blocked | None:
    return next((process.blocked for process in report.processes if process.pid == pid), None)


def test_a_frozen_filesystem_is_seen_within_three_ticks_and_forgotten_when_it_thaws(job: Job, filesystem: Path) -> None:
    pid = job.rank(0)
    report = job.until(lambda report: any(event.kind is EventKind.PROGRESS for event in report.events))
    assert find(report, pid).role is Role.RANK
    assert blocked(report, pid) is None
    set_frozen(filesystem, True)
    time.sleep(0.2)
    reports = [job.tick() for _ in range(3)]
    call = blocked(reports[-1], pid)
    assert call is not None
    assert (call.state, call.syscall, call.wchan) == ("D", "write", "percpu_rwsem_wait")
    assert (call.path, call.mount, call.fs_type) == (str(job.log), str(filesystem), "ext4")
    assert call.device is not None
    assert call.device.startswith("/dev/loop")
    assert call.thread_id == pid
    longer = blocked(job.tick(), pid)
    assert longer is not None
    assert longer.seconds > call.seconds > INTERVAL_S
    set_frozen(filesystem, False)
    report = job.until(lambda report: bool(report.events))
    assert blocked(report, pid) is None
    assert find(report, pid).io_bytes


CALLS = {
    "mkdir": "os.mkdir(sys.argv[1] + '/made')",
    "openat": "os.chdir(sys.argv[1]); os.open('made', os.O_CREAT | os.O_WRONLY)",
    "rename": "os.rename(sys.argv[1] + '/a', sys.argv[1] + '/b')",
    "unlink": "os.unlink(sys.argv[1] + '/a')",
    "ftruncate": "os.ftruncate(fd, 0)",
    "write": "import threading; threading.Thread(target=os.write, args=(fd, b'x')).start(); time.sleep(100)",
    None: "import mmap; os.ftruncate(fd, 4096); m = mmap.mmap(fd, 4096); wait(); m[0] = 1",
}


def test_calls_with_a_path_threads_and_page_faults_are_named_like_writes(job: Job, filesystem: Path) -> None:
    (filesystem / "a").touch()
    os.chown(filesystem / "a", USER, USER)
    prelude = (
        "import os, sys, time\n"
        "fd = os.open(sys.argv[1] + '/a', os.O_RDWR)\n"
        "def wait():\n"
        "    print(flush=True); sys.stdin.readline()\n"
    )
    pids = {}
    for name, call in CALLS.items():
        code = prelude + (call if "wait()" in call else f"wait(); {call}").replace("; ", "\n")
        pids[name] = job.rank(len(pids), PYTHON, "-c", code, str(filesystem), talk=True)
    for process in job.processes:
        assert process.stdout is not None
        process.stdout.readline()
    set_frozen(filesystem, True)
    for process in job.processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()

    def calls(report: Report) -> dict[str | None, Blocked]:
        return {name: call for name, pid in pids.items() if (call := blocked(report, pid)) is not None}

    found = calls(job.until(lambda report: len(calls(report)) == len(CALLS), ticks=8))
    assert {name: call.syscall for name, call in found.items()} == {name: name for name in CALLS}
    assert {call.mount for name, call in found.items() if name} == {str(filesystem)}
    paths = {name: Path(call.path).name for name, call in found.items() if call.path}
    assert paths == {
        "mkdir": "made", "openat": "made", "rename": "a", "unlink": "a", "ftruncate": "a", "write": "a",
    }  # fmt: skip
    assert found["write"].thread_id != pids["write"]
    assert found[None].wchan


def test_a_probe_that_hangs_is_counted_and_holds_up_nothing(job: Job, filesystem: Path) -> None:
    job.rank(0)
    job.until(lambda report: bool(report.logs))
    set_frozen(filesystem, True)
    command = ProbeMount(id="p1", mount=str(filesystem), directory=str(filesystem), uid=USER)
    job.agent.commands.accept((command,), clock.monotonic())
    began = clock.monotonic()
    report = job.until(lambda report: bool(report.results))
    assert 2.4 < clock.monotonic() - began < 10
    (result,) = report.results
    assert result.ok
    assert result.probe is not None
    assert result.probe.responding is False
    again = ProbeMount(id="p2", mount=str(filesystem), directory=str(filesystem), uid=USER)
    job.agent.commands.accept((command, again), clock.monotonic())
    ticked = clock.monotonic()
    report = job.tick()
    assert clock.monotonic() - ticked < 2.4, "it waited for the second probe"
    assert [result.command_id for result in report.results] == ["p2"]
    assert [probe.probe for probe in report.hung_probes] == [f"probe:{filesystem}:{USER}"]
    out_s = [row.seconds for each in (report, job.tick()) for row in each.mounts if not row.responding]
    assert len(out_s) == 2 and out_s[1] > out_s[0]
    set_frozen(filesystem, False)
    report = job.until(lambda report: not report.hung_probes)
    assert [(probe.mount, probe.responding) for probe in report.mounts] == [(str(filesystem), True)]
    third = ProbeMount(id="p3", mount=str(filesystem), directory=str(filesystem), uid=USER)
    job.agent.commands.accept((third,), clock.monotonic())
    (result,) = job.until(lambda report: bool(report.results)).results
    assert result.probe is not None
    assert (result.probe.responding, result.probe.error) == (True, None)
    assert {path.name for path in filesystem.iterdir()} == {"lost+found", "train.log"}


def test_an_error_is_the_mounts_answer_and_another_mount_is_no_answer(job: Job, filesystem: Path) -> None:
    (filesystem / "closed").mkdir(mode=0o700)
    commands = (
        ProbeMount(id="a", mount=str(filesystem), directory=str(filesystem / "closed"), uid=USER),
        ProbeMount(id="b", mount=str(filesystem) + "x", directory="/nowhere", uid=USER),
    )
    job.rank(0, "sleep", "100")  # as a user without a process here nothing is looked at
    job.until(lambda report: bool(report.processes))
    job.agent.commands.accept(commands, clock.monotonic())
    results: dict[str, CommandResult] = {}
    while len(results) < 2:
        answered = job.until(lambda report: bool(report.results)).results
        results |= {each.command_id: each for each in answered}
    probe = results["a"].probe
    assert probe is not None
    assert probe.responding
    assert str(probe.error).startswith("EACCES")
    assert not results["b"].ok
    assert "is on / here" in str(results["b"].error)


def test_stacks_of_a_python_in_uninterruptible_sleep(job: Job, filesystem: Path) -> None:
    stuck, idle = job.rank(0), job.rank(1, PYTHON, "-c", "import time\ntime.sleep(100)")
    dead = job.rank(2, "sleep", "100")
    job.until(lambda report: bool(report.events))
    set_frozen(filesystem, True)
    job.until(lambda report: blocked(report, stuck) is not None)
    job.agent.commands.accept((DumpStacks(id="s", job_id=JOB, restarts=0),), clock.monotonic())
    (result,) = job.until(lambda report: bool(report.results)).results
    assert result.ok
    stacks = {stack.pid: stack for stack in result.stacks}
    assert stacks[stuck].threads[0].frames[0].function == "log_iteration"
    assert (stacks[stuck].state, stacks[stuck].syscall, stacks[stuck].rank) == ("D", "write", 0)
    assert stacks[idle].threads[0].name == "MainThread"
    assert dead not in stacks  # sleep is never a rank
    assert find(job.tick(), idle).state == "S"


def test_a_rank_that_is_no_python_is_a_stack_with_a_reason(job: Job) -> None:
    pid = job.rank(0, "/usr/bin/perl", "-e", "sleep 100")
    job.until(lambda report: any(process.role is Role.RANK for process in report.processes))
    job.agent.commands.accept((DumpStacks(id="s", job_id=JOB, restarts=0),), clock.monotonic())
    (result,) = job.until(lambda report: bool(report.results)).results
    assert [(stack.pid, stack.threads) for stack in result.stacks] == [(pid, ())]
    assert "py-spy" in str(result.stacks[0].error)


def test_a_dead_rank_is_a_zombie_and_stays_a_rank(job: Job) -> None:
    pid = job.rank(1)
    job.until(lambda report: any(process.pid == pid for process in report.processes))
    job.processes[0].kill()
    process = find(job.tick(), pid)
    assert (process.state, process.role, process.rank) == ("Z", Role.RANK, 1)
    job.processes[0].wait()
    assert not [process for process in job.tick().processes if process.pid == pid]


def test_a_kill_switch_is_the_owners_written_once_and_removed_by_its_writer(job: Job, filesystem: Path) -> None:
    path = filesystem / "kill"
    job.rank(0, "/usr/bin/perl", "-e", "sleep 100", uid=USER)
    job.until(lambda report: bool(report.processes))
    content = compose_line({"by": "slurm-watchdog", "incident": "i1"})
    other = compose_line({"by": "slurm-watchdog", "incident": "i2"})

    def run(*commands: WriteKillSwitch | RemoveKillSwitch) -> list[tuple[str, bool, str | None]]:
        job.agent.commands.accept(commands, clock.monotonic())
        found = list[tuple[str, bool, str | None]]()
        for _ in range(10):
            found += [(result.command_id, result.ok, result.error) for result in job.tick().results]
        return sorted(found)

    write = WriteKillSwitch(id="w1", job_id=JOB, restarts=0, path=str(path), uid=USER, content=content)
    assert run(write, write) == [("w1", True, None)]
    assert path.read_text() == content
    assert path.stat().st_uid == USER
    assert run(write) == []
    refused = run(
        WriteKillSwitch(id="w2", job_id=JOB, restarts=0, path=str(path), uid=0, content=content),
        WriteKillSwitch(id="w3", job_id="1", restarts=0, path=str(path), uid=USER, content=content),
        WriteKillSwitch(id="w4", job_id=JOB, restarts=0, path=f"{filesystem}/a/../kill", uid=USER, content=content),
        WriteKillSwitch(id="w5", job_id=JOB, restarts=0, path=str(path), uid=USER, content=other),
        WriteKillSwitch(id="w6", job_id=JOB, restarts=0, path=str(path), uid=USER, content=content),
    )
    assert [(name, ok) for name, ok, _ in refused] == [
        ("w2", False), ("w3", False), ("w4", False), ("w5", False), ("w6", True),
    ]  # fmt: skip
    # Another's switch stays; ours is not there, which is what was asked for.
    foreign = RemoveKillSwitch(id="r1", job_id=JOB, path=str(path), uid=USER, content=other)
    assert run(foreign) == [("r1", True, None)]
    assert path.read_text() == content
    remove = RemoveKillSwitch(id="r2", job_id=JOB, path=str(path), uid=USER, content=content)
    assert run(remove) == [("r2", True, None)]
    assert run(RemoveKillSwitch(id="r3", job_id=JOB, path=str(path), uid=USER, content=content)) == [("r3", True, None)]
    assert [each.name for each in filesystem.iterdir() if "kill" in each.name] == []


def test_a_symbolic_link_is_not_followed(job: Job, filesystem: Path) -> None:
    victim = filesystem / "victim"
    victim.write_text("precious")
    (filesystem / "kill").symlink_to(victim)
    job.rank(0)
    job.until(lambda report: bool(report.processes))
    command = WriteKillSwitch(
        id="w", job_id=JOB, restarts=0, path=f"{filesystem}/kill", uid=USER, content=compose_line({"by": "x"})
    )
    job.agent.commands.accept((command,), clock.monotonic())
    (result,) = job.until(lambda report: bool(report.results)).results
    assert not result.ok
    assert victim.read_text() == "precious"


def test_a_kill_switch_in_the_default_place_is_the_agents_own_and_goes_with_its_job(job: Job) -> None:
    directory = Path(f"/run/slurm-watchdog/jobs/{JOB}.0")
    watch = JobWatch(job_id=JOB, restarts=0, uid=USER, kill_switch=f"{directory}/kill")
    job.agent.jobs.hear([watch])
    write = WriteKillSwitch(
        id="w", job_id=JOB, restarts=0, path=f"{directory}/kill", uid=USER, content=compose_line({"by": "x"})
    )
    job.agent.commands.watch_jobs((watch,), clock.monotonic())
    job.agent.commands.accept((write,), clock.monotonic())
    (result,) = job.until(lambda report: bool(report.results)).results
    assert (result.ok, result.error) == (True, None)
    assert (directory / "kill").read_text() == compose_line({"by": "x"})
    about = directory.stat()
    assert (about.st_uid, about.st_mode & 0o777) == (os.geteuid(), 0o755)
    job.agent.jobs.hear([])
    for _ in range(3):
        job.tick()
    assert directory.exists(), "while nobody says which jobs are here nothing is removed"
    job.agent.jobs.hear([], [], clock.monotonic())
    job.until(lambda report: not directory.exists())


def test_a_trackers_step_is_a_checkpoint(job: Job, filesystem: Path) -> None:
    tracker = filesystem / "latest_checkpointed_iteration.txt"
    tracker.write_text("100")
    job.rank(0)
    watch = JobWatch(job_id=JOB, restarts=0, uid=USER, checkpoint_trackers=(str(tracker),))
    job.agent.jobs.hear([watch])

    def checkpoints(report: Report) -> list[int | None]:
        # Jobs of another cluster on this machine are seen, too.
        mine = [event for event in report.events if event.source == str(tracker)]
        return [event.step for event in mine if event.kind is EventKind.CHECKPOINT]

    assert checkpoints(job.until(lambda report: bool(checkpoints(report)))) == [100]
    tracker.write_text("200")
    assert checkpoints(job.until(lambda report: bool(checkpoints(report)))) == [200]


SRUN = """#!/bin/bash
srun --nodes=2 --ntasks-per-node=2 bash -c 'exec 5>&1; "$0" "$1" --steps 1000 --step-seconds 0.2 --num-workers 1 --log {log}; true' {python} {trainer}
"""


def test_ranks_on_a_real_slurm(cluster: Cluster) -> None:
    log = cluster.shared / "train.log"
    script = SRUN.format(python=PYTHON, trainer=CHECKOUT / "tests/rig/trainer.py", log=log)
    job_id = cluster.sbatch(script, "--nodes=2", "--ntasks-per-node=2")
    cluster.wait_for_job_state(job_id, "RUNNING")
    end = clock.monotonic() + 30
    ranks: dict[int | None, Process] = {}
    reports: list[Report] = []
    while clock.monotonic() < end and (len(ranks) < 4 or not any(report.events for report in reports)):
        reports = [look(cluster, node) for node in ("n1", "n2")]
        mine = [process for report in reports for process in report.processes if process.job_id == job_id]
        ranks = {process.rank: process for process in mine if process.role is Role.RANK}
    assert sorted(rank for rank in ranks if rank is not None) == [0, 1, 2, 3]
    assert {(rank.step_id, rank.world_size) for rank in ranks.values()} == {("0", 4)}
    assert sorted(rank.local_rank or 0 for rank in ranks.values()) == [0, 0, 1, 1]
    mine = [process for report in reports for process in report.processes if process.job_id == job_id]
    helpers = {(process.comm, process.step_id) for process in mine if process.role is Role.HELPER}
    assert ("srun", "batch") in helpers
    assert ("bash", "0") in helpers
    assert sorted(process.rank or 0 for process in mine if process.role is Role.WORKER) == [0, 1, 2, 3]
    assert not [process for process in mine if process.comm == "slurmstepd"]
    assert {event.source for report in reports for event in report.events if event.step} >= {str(log)}


def look(cluster: Cluster, node: str) -> Report:
    """What `agent --once --json` says on a node."""
    program = (
        "import sys; from slurm_watchdog.config.loading import parse_config; from slurm_watchdog.agent.service import run_agent; "
        "from slurm_watchdog.agent.settings import settings_of; "
        "config = settings_of(parse_config('agent: {node_name: %s}' % sys.argv[1])); "
        "sys.exit(run_agent(config, once=True, as_json=True))"
    )
    done = cluster.node_run(node, [sys.executable, "-c", program, node], timeout_s=30, cwd=CHECKOUT)
    return report_of(done.stdout)
