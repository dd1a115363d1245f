"""A node whose GPUs are files, with real processes that hold them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.gpu.orphan_processes import UNSEEN_JOB_GRACE_S, OrphanGpuProcesses
from slurm_watchdog.agent.proc.entry import Entry, JobMember, JobStep, ProcessFacts, Stat
from slurm_watchdog.agent.proc.files import links_of, read_stat
from slurm_watchdog.model.observations import Gpu, GpuHolder, Role

USER = 4242
GRACE_S = 10.0
GPUS = (
    Gpu(uuid="GPU-a", index=1, minor=0, pids=(), process_memory_bytes=()),
    Gpu(uuid="GPU-b", index=0, minor=1, pids=(), process_memory_bytes=()),
)


class Node:
    """A node whose GPUs are files; its processes are real ones, with the owner that the test gives them."""

    def __init__(self, directory: Path, probes: Children) -> None:
        self.devices = f"{directory}/nvidia"
        for name in ("0", "1", "ctl", "-uvm", "-modeset"):
            Path(self.devices + name).touch()
        self.holders = OrphanGpuProcesses(probes, GRACE_S, self.devices_of, devices=self.devices, trusts_nvml=True)
        self.table: dict[int, Entry] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self.now = 1000.0
        self.read: list[int] = []  # Pids of those whose open files were read.

    def devices_of(self, threads: Sequence[tuple[int, int]]) -> list[tuple[str, ...] | None]:
        """As a child of each process's user reads it."""
        return [self._open_of(*each) for each in threads]

    def _open_of(self, pid: int, thread: int) -> tuple[str, ...] | None:
        self.read.append(pid)
        try:
            _, names = links_of(pid, thread)
        except OSError:
            return None
        return tuple(sorted(set(names)))

    def start(self, *devices: str) -> int:
        """A process that has these open; it is in no table yet."""
        code = f"import sys, time\nf = [open({self.devices!r} + d) for d in sys.argv[1:]]\nprint(flush=True)\ntime.sleep(99)"
        process = subprocess.Popen([sys.executable, "-c", code, *devices], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        self.started.append(process)
        return process.pid

    def add(
        self, pid: int, job: str | None = None, *, uid: int = USER, identified: bool = True, cgroup: bool = False,
        left_over: bool = False, flags: int = 0, comm: str = "python",
    ) -> int:  # fmt: skip
        start = read_stat(pid).start_ticks
        place = JobStep(job, "0") if job and cgroup else None
        environ = {} if identified else None
        known = ProcessFacts(pid, start, 1, comm, uid, place, environ)
        member = JobMember(job, "0", Role.HELPER, left_over=left_over) if job else None
        self.table[pid] = Entry(known, Stat(comm, "S", 1, flags, 0, start), member=member)
        return pid

    def tick(
        self, seconds: float, *running: str, unknown: bool = False, gpus: tuple[Gpu, ...] = GPUS
    ) -> tuple[GpuHolder, ...]:
        self.now += seconds
        return self.holders.collect(self.now, self.table, frozenset(), gpus, None if unknown else frozenset(running))

    def rows_after(self, *running: str, gpus: tuple[Gpu, ...] = GPUS) -> tuple[GpuHolder, ...]:
        """What is reported after more than every grace, the jobs `running` all the time."""
        self.tick(0, *running, gpus=gpus)
        return self.tick(UNSEEN_JOB_GRACE_S + GRACE_S, *running, gpus=gpus)
