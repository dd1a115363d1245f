"""A simulated cluster of training jobs: what its nodes, ranks, GPUs and logs, and its Slurm, would say at each moment.

One seed, one world. Time is an argument and only goes forward. Nothing here knows what a detector looks at.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.observations import (
    Blocked,
    Checkpoint,
    Gpu,
    GpuHolder,
    HungProbe,
    Link,
    MountProbe,
    Pressure,
    Process,
    Role,
    Usage,
)
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from tests.accuracy import looks
from tests.accuracy.looks import Look
from tests.accuracy.training import DIRECTORY, LOG, Job, Node, Plan, Rank, Worker

INTERVAL_S = 5.0
PROBE_EVERY_S = 30.0
DISK_LOOK_S = 30.0
MEMORY = 22 * 2**30


@dataclass
class Mount:
    """One shared filesystem."""

    path: str = "/gpfs"
    device: str = "gpfs0"
    fs_type: str = "gpfs"
    stuck: dict[str, float] = field(default_factory=dict)
    """Node -> since when it does not answer there."""


@dataclass
class Said:
    """What one agent has to say at one moment."""

    node: Node
    at: float
    processes: list[Process] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    dated: bool = True
    """The agent knows when each line was written; otherwise it was at its look."""
    lines: list[tuple[float, str, str, str]] = field(default_factory=list)
    """(when, job, stream, line)."""
    kernel: list[tuple[float, str]] = field(default_factory=list)
    probes: list[MountProbe] = field(default_factory=list)
    hung: list[HungProbe] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    holders: list[GpuHolder] = field(default_factory=list)
    usages: tuple[Usage, ...] = ()
    pressures: tuple[Pressure, ...] = ()
    links: tuple[Link, ...] = ()


class World:
    """Nodes, jobs, filesystems and Slurm. Things that are to happen stand in a timetable."""

    def __init__(self, seed: int, nodes: int):
        self.rng = random.Random(seed)
        self.nodes = [Node(f"n{index}", index, boot_id=f"boot-{seed}-{index}") for index in range(nodes)]
        for node in self.nodes:
            node.phase = self.rng.random() * INTERVAL_S
        self.jobs: list[Job] = []
        self.mounts = [Mount()]
        self.slurm_answers = True
        self.dated_lines = True
        """Agents know when a line was written; otherwise it was when they looked, as it is where no line has a date."""
        self.records: Callable[[], tuple[RecordSet, ...]] | None = None
        """What the ranks of the first job have recorded of their collectives, if anything asks for it."""
        self._timetable: list[tuple[float, int, Callable[[float], None]]] = []
        self.now = 0.0

    def add_job(self, plan: Plan, at: float, nodes: list[Node]) -> Job:
        """A job that starts at `at` on these nodes."""
        job = self.submit(plan, at, nodes)
        self.at(at, job.start)
        return job

    def submit(self, plan: Plan, at: float, nodes: list[Node]) -> Job:
        """A job that waits in the queue until somebody starts it."""
        job = Job(str(1882409 + len(self.jobs)), plan, nodes, random.Random(self.rng.random()), at)
        self.jobs.append(job)
        return job

    def at(self, t: float, what: Callable[[float], None]) -> None:
        """Puts something into the timetable."""
        self._timetable.append((t, len(self._timetable), what))
        self._timetable.sort(key=lambda each: each[:2])

    def advance(self, t: float) -> None:
        """Lets the time pass until `t`."""
        while self._timetable and self._timetable[0][0] <= t:
            due, _, what = self._timetable.pop(0)
            for job in self.jobs:
                job.advance(due)
            what(due)
        for job in self.jobs:
            job.advance(t)
        self.now = t

    # ------------------------------------------------------------------------------------ what it says

    def slurm(self) -> SlurmView:
        """Slurm's listing now."""
        busy = {node.name for job in self.jobs if job.state == "RUNNING" for node in job.nodes}
        return SlurmView(
            jobs=tuple(_slurm_job(job) for job in self.jobs if self.now >= job.submitted_at),
            nodes=tuple(
                SlurmNode(name=n.name, address=n.name, state=n.state or ("ALLOCATED" if n.name in busy else "IDLE"))
                for n in self.nodes
            ),
        )

    def report(self, node: Node) -> Said:
        """Everything that a node's agent sees now. What was read of logs and kernel is not said again."""
        t = self.now
        said = Said(node, t, dated=self.dated_lines)
        on_gpu: dict[int, tuple[Rank, Look]] = {}
        for job in self.jobs:
            if job.host is node and job.lines:
                said.lines += [(at, job.job_id, stream, line) for at, stream, line in job.lines]
                job.lines = []
            if node not in job.nodes:
                continue
            for rank in job.ranks:
                if rank.node == node.name and not rank.gone:
                    said.processes.append(self._process(job, rank, t))
                    said.processes += [self._worker(job, rank, each) for each in rank.workers]
                    if not rank.zombie:
                        on_gpu[rank.local] = rank, job.gpu_look(rank, t)
            if job.host is node and job.plan.save_on_disk and job.state == "RUNNING" and job.plan.save_every:
                said.checkpoints.append(_on_disk(job, t))
        said.gpus = [self._gpu(node, index, *on_gpu.get(index, (None, looks.IDLE_GPU))) for index in range(node.gpus)]
        said.kernel, node.kernel = node.kernel, []
        said.holders = list(node.holders)
        said.usages, said.pressures, said.links = node.usages, node.pressures, node.links
        said.hung = [HungProbe(probe=name, seconds=t - since) for name, since in node.hung.items() if t > since]
        if t - node.probed_at >= PROBE_EVERY_S:
            node.probed_at = t
            said.probes = [self.probe(node, mount, t, wrote=False) for mount in self.mounts]
        return said

    def probe(self, node: Node, mount: Mount, t: float, *, wrote: bool) -> MountProbe:
        """What a probe of a mount on a node finds."""
        since = mount.stuck.get(node.name)
        out_s = max(0.0, t - max(since, node.probed_at - 60.0)) if since is not None else 0.0
        return MountProbe(
            mount=mount.path, device=mount.device, fs_type=mount.fs_type, responding=since is None,
            seconds=0.01 if since is None else max(10.0, out_s), wrote=wrote and since is None,
        )  # fmt: skip

    def _process(self, job: Job, rank: Rank, t: float) -> Process:
        job.count(rank, t)
        look = rank.look
        state, age_s = ("Z", t - rank.since) if rank.zombie else (look.state, None)
        blocked = None
        if state == "D" or (state in "Tt"):
            age_s = t - rank.since
        elif state == "R" and self.rng.random() < 0.004 and look.io > 1e5:
            state, age_s = "D", 0.0  # a moment in D, as in every write to a disk
        if not rank.zombie and look.syscall is not None:
            blocked = _blocked(rank, look, t)
        return Process(
            pid=rank.pid,
            start_ticks=rank.start_ticks,
            job_id=job.job_id,
            role=Role.RANK,
            comm="python",
            state=state,
            state_age_s=age_s,
            uid=1000,
            step_id="0",
            rank=rank.number,
            local_rank=rank.local,
            world_size=len(job.ranks),
            cpu_s=round(rank.cpu_s, 2),
            io_bytes=int(rank.io_bytes),
            threads=60,
            blocked=blocked,
        )

    def _worker(self, job: Job, rank: Rank, worker: Worker) -> Process:
        look = job.worker_look(rank)
        return Process(
            pid=worker.pid, start_ticks=worker.start_ticks, job_id=job.job_id, role=Role.WORKER, comm="pt_data_worker",
            state=look.state, uid=1000, step_id="0", rank=rank.number, cpu_s=round(worker.cpu_s, 2),
            io_bytes=int(worker.io_bytes), threads=3,
        )  # fmt: skip

    def _gpu(self, node: Node, index: int, rank: Rank | None, look: Look) -> Gpu:
        noise = self.rng.random
        busy = look.util > 0.5
        fields: dict[str, object] = {
            "uuid": node.uuid(index),
            "index": index,
            "pci_bus_id": f"0000:{0x10 + index:02x}:00.0",
            "minor": index,
            "name": "NVIDIA A100-SXM4-80GB",
            "utilization_ratio": min(1.0, look.util + 0.02 * noise()) if busy else (0.02 if noise() < 0.02 else 0.0),
            "sm_clock_hz": 1e6 * (look.clock_mhz - (15.0 if busy and noise() < 0.1 else 0.0)),
            "power_w": round(look.power_w * (0.96 + 0.08 * noise()), 1),
            "temperature_c": round(look.temp_c + 3.0 * noise() - 1.5),
            "memory_used_bytes": MEMORY if rank is not None else 0,
            "memory_total_bytes": 80 * 2**30,
            "throttle": look.throttle,
            "pids": () if rank is None else (rank.pid,),
            "ecc_uncorrected": 0,
        }
        fields.update(node.gpu_changes.get(index, {}))
        return Gpu(**fields)  # type: ignore[arg-type]


def _blocked(rank: Rank, look: Look, t: float) -> Blocked | None:
    seconds = t - rank.since
    if seconds < INTERVAL_S:
        return None
    return Blocked(
        thread_id=rank.pid,
        seconds=seconds,
        state=look.state,
        wchan=look.wchan,
        syscall=look.syscall,
        path=look.path,
        mount=look.mount,
        fs_type="gpfs" if look.mount else None,
        device="gpfs0" if look.mount else None,
    )


def _slurm_job(job: Job) -> SlurmJob:
    return SlurmJob(
        job_id=job.job_id,
        state=job.state,
        name=job.plan.name,
        user=job.plan.user,
        uid=1000,
        partition="gpu",
        nodes=tuple(n.name for n in job.nodes) if job.state == "RUNNING" else (),
        batch_host=job.host.name if job.state == "RUNNING" else None,
        restarts=job.restarts,
        start_at=job.started_at if job.state == "RUNNING" else None,
        requeueable=True,
        stdout=LOG,
        workdir="/gpfs/m4",
    )


def _on_disk(job: Job, t: float) -> Checkpoint:
    """As the agent saw it at its last look."""
    step, at = job.saved or (None, t)
    frozen = job.frozen_at is not None and t - job.frozen_at > DISK_LOOK_S
    writing = job.writing_since is not None and t - job.writing_since > DISK_LOOK_S and not frozen
    return Checkpoint(
        job_id=job.job_id,
        directory=DIRECTORY,
        layout="megatron",
        step=step,
        path=f"{DIRECTORY}/iter_{step or 0:07d}" if step else None,
        age_s=t - at if step else None,
        size_bytes=2_300_000_000_000,
        writing_step=job.step if writing else None,
        writing=writing,
    )
