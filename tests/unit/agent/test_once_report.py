"""The lines of `agent --once`: everything that a report can hold is on them, and nothing in it is taken for markup."""

from __future__ import annotations

import contextlib
import io

from slurm_watchdog.agent.service import show_report
from slurm_watchdog.model.observations import (
    Blocked,
    Checkpoint,
    FaultSeverity,
    Gpu,
    GpuHolder,
    HungProbe,
    LogFile,
    MigInstance,
    MountProbe,
    NodeEvent,
    Process,
    Role,
)
from slurm_watchdog.model.report import Report

EMPTY = Report(node="n1", boot_id="b", agent_id="a", sequence=1)


def shown(report: Report) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show_report(report)
    return out.getvalue()


def full() -> Report:
    blocked = Blocked(thread_id=41, seconds=65.0, state="D", syscall="write", path="/gpfs/m4/log.txt", mount="/gpfs")
    return Report(
        node="n1", boot_id="b", agent_id="a", sequence=1,
        processes=(
            Process(pid=41, start_ticks=1, job_id="7", role=Role.RANK, comm="python", state="D", state_age_s=65.0, uid=1000,
                    rank=3, local_rank=1, world_size=8, blocked=blocked, threads=64, container_pid=9),
        ),
        logs=(LogFile(job_id="7", path="/gpfs/out", error="its filesystem has not answered for 65 s"),),
        gpus=(
            Gpu(uuid="GPU-eb00", index=0, pci_bus_id="0000:c1:00.0", minor=3, utilization_ratio=0.0, power_w=68.0, pids=(41,),
                sm_clock_hz=1.155e9, throttle=("gpu_idle",), ecc_corrected=2, ecc_uncorrected=1, remapped_rows_uncorrected=1,
                remap_failed=True, retired_pages=4, pcie_link_width=8, pcie_link_width_max=16, nvlinks_active=11, nvlinks_down=1,
                mig=(MigInstance(uuid="MIG-1"),), error="NVML_ERROR_UNKNOWN"),
        ),
        mounts=(MountProbe(mount="/gpfs", responding=False, seconds=61.0),),
        checkpoints=(Checkpoint(job_id="7", directory="/gpfs/ckpt", layout="megatron", step=400, writing_step=500),),
        gpu_holders=(
            GpuHolder(pid=99, start_ticks=5, uid=1000, user="eve", comm="python", state="S", job_id="6", minors=(0,),
                      orphan_for_s=300.0),
        ),
        node_events=(
            NodeEvent(source="kernel_log", name="xid", severity=FaultSeverity.CRITICAL, age_s=4.0, line="NVRM: Xid 79", repeats=3),
        ),
        hung_probes=(HungProbe(probe="files:/gpfs:1000", seconds=60.0),),
        problems=("gpu: NVML is away",),
    )  # fmt: skip


def test_everything_in_a_report_is_shown() -> None:
    text = shown(full())
    for words in (
        "processes\n  pid=41", "job_id=7", "role=rank", "rank=3 local_rank=1 world_size=8", "container_pid=9", "state_age_s=65",
        "blocked=(path=/gpfs/m4/log.txt mount=/gpfs thread_id=41 seconds=65 state=D syscall=write)",
        'error="its filesystem has not answered for 65 s"', "uuid=GPU-eb00", "sm_clock_hz=1.155e+09", "power_w=68",
        "throttle=gpu_idle", "ecc_corrected=2 ecc_uncorrected=1", "remap_failed=True", "pcie_link_width=8 pcie_link_width_max=16",
        "utilization_ratio=0 ", "mig=(uuid=MIG-1)", "NVML_ERROR_UNKNOWN", "mount=/gpfs responding=False", "step=400", "writing_step=500",
        "minors=0", "orphan_for_s=300", 'line="NVRM: Xid 79"', "repeats=3", "probe=files:/gpfs:1000 seconds=60",
        "problem: gpu: NVML is away",
    ):  # fmt: skip
        assert words in text, words


def test_an_empty_report_says_that_no_job_is_seen_here() -> None:
    first, last = shown(EMPTY).strip().splitlines()
    assert first.startswith("n1: ")
    assert last == "No process of a Slurm job is seen on n1."


def test_a_hostile_command_name_is_shown_as_it_is() -> None:
    process = Process(pid=1, start_ticks=1, job_id="7", role=Role.HELPER, comm="[bold]x[/]", state="S", uid=0)
    assert "[bold]x[/]" in shown(Report(node="n", boot_id="", agent_id="a", sequence=1, processes=(process,)))
