"""What a node of the simulated fleet says: 8 ranks that compute on 8 GPUs, a launcher, logs and checkpoints of its job.

Everything follows from the node's number and the number of the round, so that two processes (or a process
started twice) agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slurm_watchdog.model.observations import (
    Event,
    EventKind,
    FaultSeverity,
    Gpu,
    LogFile,
    NodeEvent,
    Process,
    Role,
)
from slurm_watchdog.model.report import Report

RANKS = 8
STEP_S = 4.0
WHOLE_EVERY = 6
"""Rounds between two whole reports of a node: 30 s at 5 s."""
SAVE_EVERY = 120
"""Rounds between two checkpoints of a job: ten minutes at 5 s."""
FIRST_PID = 100_000
STATE = b"00000000.1"
"""Classes that never change."""
FAULT_XID = 79
"""GPU has fallen off the bus: one line is enough for a verdict."""


@dataclass(frozen=True)
class Shape:
    """How large the fleet is."""

    nodes: int
    jobs: int
    workers: int = 0
    """Data loaders of each rank."""

    @property
    def nodes_a_job(self) -> int:
        return self.nodes // self.jobs if self.jobs else self.nodes

    def job_of(self, index: int) -> str | None:
        job = index // self.nodes_a_job
        return str(100_001 + job) if job < self.jobs else None

    def is_batch_host(self, index: int) -> bool:
        return self.job_of(index) is not None and index % self.nodes_a_job == 0

    def name(self, index: int) -> str:
        return f"n{index:05d}"

    def boot_id(self, index: int) -> str:
        return f"{index:08x}-0000-4000-8000-{index:012x}"

    def uuid(self, index: int, gpu: int) -> str:
        return f"GPU-{index:08x}-{gpu:04x}-4000-8000-{index * 8 + gpu:012x}"


def report_of(shape: Shape, index: int, number: int, variant: int) -> Report:
    """The report of one node in round `number`; `variant` moves its numbers a little. No news: no events, no logs."""
    job = shape.job_of(index)
    return Report(
        node=shape.name(index),
        boot_id=shape.boot_id(index),
        agent_id="",
        sequence=0,
        state=STATE,
        processes=() if job is None else _processes(shape, index, job, number, variant),
        gpus=tuple(_gpu(shape, index, gpu, number, variant, busy=job is not None) for gpu in range(RANKS)),
    )


def small_of(shape: Shape, index: int, whole: int) -> Report:
    """The report of a node that is as its whole report of this number said."""
    return Report(
        node=shape.name(index), boot_id=shape.boot_id(index), agent_id="", sequence=0, state=STATE, same_as=whole
    )


def _processes(shape: Shape, index: int, job: str, number: int, variant: int) -> tuple[Process, ...]:
    first = index % shape.nodes_a_job * RANKS
    world = shape.nodes_a_job * RANKS
    launcher = Process(
        pid=FIRST_PID - 1, start_ticks=90_000, job_id=job, role=Role.HELPER, comm="slurmstepd", state="S",
        uid=0, step_id="0", cpu_s=2.0, io_bytes=150_000, threads=3,
    )  # fmt: skip
    found = [launcher]
    for rank in range(RANKS):
        found.append(_rank(job, first + rank, rank, world, number, variant))
        found += [_worker(job, first + rank, rank, each, number, variant) for each in range(shape.workers)]
    return tuple(found)


def _rank(job: str, rank: int, local: int, world: int, number: int, variant: int) -> Process:
    step = number + variant / 16
    return Process(
        pid=FIRST_PID + local, start_ticks=91_000 + local, job_id=job, role=Role.RANK, comm="python3",
        state="S" if (number * 7 + variant + local) % 23 == 0 else "R", uid=1000, step_id="0", rank=rank,
        local_rank=local, world_size=world, cpu_s=round(2000 + 5.03 * step + local, 2),
        io_bytes=20_000_000_000 + int(81_000_000 * step), threads=97,
        context_switches=500_000 + int(913 * step) if number % 12 == 0 else None,
        cpu_ratio=1.006, io_bytes_s=16_200_000.0, worked_age_s=0.0, quiet_s=float(5 * (number % 4)),
        runnable_s=round(1990 + 5.0 * (number - number % 12) + local, 2), runnable_age_s=5.0 * (number % 12) or None,
    )  # fmt: skip


def _worker(job: str, rank: int, local: int, worker: int, number: int, variant: int) -> Process:
    step = number + variant / 16
    return Process(
        pid=FIRST_PID + 1000 * (worker + 1) + local, start_ticks=92_000 + local, job_id=job, role=Role.WORKER,
        comm="pt_data_worker", state="S", uid=1000, step_id="0", rank=rank, local_rank=local,
        cpu_s=round(300 + 0.7 * step, 2), io_bytes=9_000_000_000 + int(5_000_000 * step), threads=2,
    )  # fmt: skip


def _gpu(shape: Shape, index: int, gpu: int, number: int, variant: int, *, busy: bool) -> Gpu:
    wave = (number * 5 + variant * 3 + gpu) % 11
    return Gpu(
        uuid=shape.uuid(index, gpu), index=gpu, pci_bus_id=f"0000:{0x18 + 0x10 * gpu:02x}:00.0", minor=gpu,
        name="NVIDIA H200", utilization_ratio=(97 + wave % 4) / 100 if busy else 0.0,
        sm_clock_hz=(1_905 + 15 * (wave % 6)) * 1e6 if busy else 345e6, memory_clock_hz=3_201e6,
        power_w=round(612 + 3.7 * wave, 1) if busy else 77.0, temperature_c=float(56 + wave % 5) if busy else 31.0,
        memory_used_bytes=128_849_018_880 if busy else 4_718_592, memory_total_bytes=150_754_820_096,
        throttle=(), pids=(FIRST_PID + gpu,) if busy else (), process_memory_bytes=(128_000_000_000,) if busy else (),
        ecc_corrected=0, ecc_uncorrected=0, remapped_rows_corrected=0, remapped_rows_uncorrected=0,
        remap_pending=False, remap_failed=False, pcie_link_width=16, pcie_link_width_max=16,
        pcie_link_generation=5, pcie_link_generation_max=5, pcie_replays=0, nvlinks_active=18, nvlinks_down=0,
        nvlink_errors=0, idle_age_s=None if busy else 7200.0 + 5.0 * number,
        busy_age_s=7200.0 + 5.0 * number if busy else None, idle_ratio=0.02 if busy else 1.0, looks=6,
        recent_sm_clock_hz=1.94e9 if busy else None, usual_sm_clock_hz=1.942e9 if busy else None,
        recent_power_w=630.0 if busy else None, usual_power_w=641.0 if busy else None,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _log_path(job: str) -> str:
    return f"/shared/runs/{job}/slurm-{job}.out"


def logs_of(shape: Shape, index: int, number: int) -> tuple[LogFile, ...]:
    """The job's output, as its batch host reads it."""
    job = shape.job_of(index) or ""
    return (LogFile(job_id=job, path=_log_path(job), growth_age_s=1.0, offset=40_000 + 290 * number),)


def events_of(shape: Shape, index: int, since: int, number: int) -> tuple[Event, ...]:
    """What has come after round `since`: a line of progress in most rounds, a checkpoint every now and then. The loss
    falls, and is noisy."""
    job = shape.job_of(index) or ""
    step, source = int(number * 5.0 / STEP_S), _log_path(job)
    found = []
    if number == 0 or step > int(since * 5.0 / STEP_S):
        loss = 1.9 + 6.0 / (1 + step / 200) + 0.01 * ((step * 37 + index) % 13 - 6)
        found.append(
            Event(
                kind=EventKind.PROGRESS,
                job_id=job,
                age_s=0.7,
                source=source,
                step=1000 + step,
                total_steps=500_000,
                step_s=STEP_S + 0.01 * (step * 31 % 7),
                loss=loss,
                pattern="megatron",
                batch=2048,
            )
        )
    if any(each % SAVE_EVERY == 60 for each in range(since + 1, number + 1)):
        found.append(
            Event(
                kind=EventKind.CHECKPOINT, job_id=job, age_s=0.3, source=source, step=1000 + step,
                line=f"successfully saved checkpoint from iteration {1000 + step} to /shared/runs/{job}/checkpoints",
                pattern="megatron_saved",
            )
        )  # fmt: skip
    return tuple(found)


def fault_of(shape: Shape, index: int) -> NodeEvent:
    """A line of the kernel that convicts GPU 3 of a node."""
    return NodeEvent(
        source="kernel_log", name="xid", severity=FaultSeverity.CRITICAL, age_s=0.0, sequence=100_000 + index,
        line="NVRM: Xid (PCI:0000:48:00): 79, pid=100003, name=python3, GPU has fallen off the bus.",
        xid=FAULT_XID, gpu_uuid=shape.uuid(index, 3), pci_bus_id="0000:48:00.0", may_exclude_node=True,
    )  # fmt: skip
