"""One user's job that is in everybody's way on a node: processes, threads, mounts that never answer,
variables, short ranks, a loud log;
and he stops whatever looks at his files as him."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.figures import say
from lab.bench.process_tree import find_group_parent
from lab.bench.space import Space

FUSE_SERVER = Path(__file__).resolve().parents[2] / "tests/integration" / "fuse_server.py"
PID_MAX = Path("/proc/sys/kernel/pid_max")
SPARE_PIDS = 8000
"""Of other programs of the machine, and of the kernel's threads."""
BYTES_OF_A_PROCESS = 200 << 10
"""What a process that sleeps takes of the kernel and of page tables at most; measured: 95 KiB."""
START_S = 20.0
MADE_A_SECOND = 2000
"""Processes that are surely forked in a second."""
SHORT_RANK_MS, SHORT_RANKS = 300, 4
VARIABLE_BYTES = 128 << 10  # MAX_ARG_STRLEN, include/uapi/linux/binfmts.h
VARIABLES, PROCESSES_WITH_VARIABLES = 6, 12
"""One `execve` takes 2 MiB of both at most, a quarter of the stack's limit."""


STOPPER = """
import os, signal, time
while True:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if open(f"/proc/{name}/comm").read().startswith("swd "):
                os.kill(int(name), signal.SIGSTOP)
        except OSError:
            pass
    time.sleep(2)
"""
"""Stops each child of the agent that he may: those that have become him, to look at his files."""


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    processes: int = 55_000
    threads: int = 1500
    mounts: int = 40
    log_bytes_per_s: float = 1e9 / 60


def room_for(wanted: int) -> int:
    """So many processes the machine can take besides its own."""
    memory = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return min(wanted, memory // 2 // BYTES_OF_A_PROCESS)


@contextmanager
def numbers_for(processes: int) -> Iterator[int]:
    """The kernel gives out so many process numbers while the block runs; how many there are, where it may not
    be told to."""
    before = int(PID_MAX.read_text())
    wanted = processes + SPARE_PIDS
    try:
        if before < wanted:
            PID_MAX.write_text(str(wanted))
    except OSError:
        say(f"kernel.pid_max stays {before}")
    try:
        yield max(0, min(processes, int(PID_MAX.read_text()) - SPARE_PIDS))
    finally:
        with contextlib.suppress(OSError):
            PID_MAX.write_text(str(before))


@dataclass
class HostileUser:
    """His job. `log` is its standard output, as Slurm has it."""

    space: Space
    directory: Path
    program: Path
    uid: int
    job_id: str
    size: Size
    log: Path
    group: Path | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _servers: list[int] = field(default_factory=list)
    _holders: list[int] = field(default_factory=list)

    def start(self) -> None:
        """All of it. Needs root."""
        self.group = self._make_group()
        self._start("sleep", str(self.size.processes))
        self._start("threads", str(self.size.threads))
        for _ in range(SHORT_RANKS):
            self._start("ranks", str(SHORT_RANK_MS))
        nonsense = {f"NCCL_X{n}": "eyJ" * (VARIABLE_BYTES // 3 - 20) for n in range(VARIABLES)}
        for rank in range(PROCESSES_WITH_VARIABLES):
            self._start("hold", environment={**nonsense, "SLURM_PROCID": str(rank)})
        self._run(["/usr/bin/python3", "-c", STOPPER], {})
        self._start("log", str(self.size.log_bytes_per_s), out=self.log)
        for number in range(self.size.mounts):
            self._hold_on_mount(number)
        for holder in self._holders:
            self._wait_for(holder)
        for pid in self._servers:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1 + self.size.processes / MADE_A_SECOND)

    def _wait_for(self, holder: int) -> None:
        """Until it is where it shall stay; its mount answers until then. Raises TimeoutError."""
        end = time.monotonic() + START_S
        while os.path.basename(os.readlink(f"/proc/{self.space.find(holder)}/exe")) != self.program.name:
            if time.monotonic() > end:
                raise TimeoutError("a process on a FUSE mount does not start")
            time.sleep(0.01)

    def count(self) -> int:
        """His processes that are there."""
        if self.group is None:
            return 0
        return len((self.group / "cgroup.procs").read_text().split())

    def close(self) -> None:
        """The space ends his processes; what is left are their groups."""
        for pid in self._servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()
        group = self.group
        while group is not None and group.name != "cpuacct" and not group.name.startswith("slurm_"):
            _remove(group)
            group = group.parent
        if group is not None and group.name.startswith("slurm_"):
            _remove(group)

    def _make_group(self) -> Path | None:
        """A control group as Slurm makes it, by which agents know what belongs to the job."""
        parent = find_group_parent(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        if parent is None:
            say("no control group can be had here: what he starts is his job's by its environment alone")
            return None
        group = parent / f"slurm_bench{os.getpid()}" / f"uid_{self.uid}" / f"job_{self.job_id}" / "step_0"
        group.mkdir(parents=True)
        return group

    def _start(self, *words: str, environment: Mapping[str, str] | None = None, out: Path | None = None) -> None:
        self._run([str(self.program), *words], environment or {}, out)

    def _run(self, command: Sequence[str], environment: Mapping[str, str], out: Path | None = None) -> int:
        words = self.space.words(command, self.uid)
        if self.group is not None:
            words = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.group), *words]
        mine = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": self.job_id, "SLURM_STEP_ID": "0", **environment}
        with open(out or os.devnull, "ab") as output:
            if out is not None:
                os.fchown(output.fileno(), self.uid, -1)
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, env=mine, start_new_session=True)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.kill)
        return process.pid

    def _hold_on_mount(self, number: int) -> None:
        """A rank whose directory and log lie on a mount that will never answer again; every second one says
        whose it is."""
        point = self.directory / f"mount{number}"
        point.mkdir()
        owner = str(self.uid * (number % 2))
        words = self.space.words([sys.executable, str(FUSE_SERVER), str(point), owner])
        server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._stack.callback(server.wait, 60)
        self._stack.callback(server.kill)
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError("no FUSE mount can be made here")
        self._servers.append(self.space.find(server.pid))
        holder = f"cd {point} && exec {self.program} hold >> data.bin"
        pid = self._run(["sh", "-c", holder], {"SLURM_PROCID": str(1000 + number)})
        self._holders.append(pid)


def _remove(group: Path) -> None:
    """Ends what is in it; thousands of processes take seconds to be gone."""
    for _ in range(300):
        try:
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
