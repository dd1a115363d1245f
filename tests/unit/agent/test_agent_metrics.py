"""The agent's metrics: what Prometheus' own parser reads from the file, what is never a label, and when it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from slurm_watchdog.agent.metrics import GPU_VALUES, MAX_ROWS, WRITE_S, AgentMetrics, job_label, probe_label
from slurm_watchdog.base.loop import Isolated
from slurm_watchdog.model.observations import (
    Blocked,
    Checkpoint,
    FaultSeverity,
    Gpu,
    GpuHolder,
    HungProbe,
    LogFile,
    MountProbe,
    NodeEvent,
    Process,
    Role,
)
from slurm_watchdog.model.report import Report

EMPTY = Report(node="n1", boot_id="b", agent_id="a", sequence=1)
GPU0 = Gpu(
    uuid="GPU-0", index=0, pci_bus_id="0000:c1:00.0", utilization_ratio=1.0, sm_clock_hz=1.98e9, memory_clock_hz=2.6e9,
    power_w=653.25, temperature_c=61.0, memory_used_bytes=40 * 2**30, memory_total_bytes=80 * 2**30,
    throttle=("sw_power_cap", "hw_slowdown"), ecc_corrected=3, ecc_uncorrected=0, remapped_rows_corrected=1,
    remapped_rows_uncorrected=0, remap_pending=True, remap_failed=False, retired_pages=0, retired_pages_pending=False,
    pcie_link_width=8, pcie_link_width_max=16, pcie_link_generation=5, pcie_replays=7, nvlinks_active=17,
    nvlinks_down=1, nvlink_errors=12, sm_active_ratio=0.9, tensor_active_ratio=0.6, dram_active_ratio=0.4,
    nvlink_bytes_s=1e9, pcie_bytes_s=1e6,
)  # fmt: skip
LABELS0 = {"gpu_uuid": "GPU-0", "gpu": "0"}


def read(metrics: AgentMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample name to (labels, value), as Prometheus' own library understands the text."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("slurm_watchdog_")
            found.setdefault(name, []).append((sample.labels, sample.value))
    return found


def told(*reports: Report, seen: Isolated | None = None, spool_bytes: int = 0) -> AgentMetrics:
    metrics = AgentMetrics(node="n1")
    for report in reports:
        metrics.update(report, seen or Isolated(), spool_bytes)
    return metrics


def process(job_id: str, rank: int | None, seconds: float | None) -> Process:
    blocked = None if seconds is None else Blocked(thread_id=1, seconds=seconds, state="D")
    return Process(
        pid=1, start_ticks=1, job_id=job_id, role=Role.RANK, comm="x", state="D", uid=0, rank=rank, blocked=blocked
    )  # fmt: skip


def test_before_the_first_tick_there_are_the_agents_own_series_only() -> None:
    found = read(AgentMetrics())
    assert found["ticks_total"] == [({}, 0.0)]
    assert "gpu_power_watts" not in found


def test_every_value_of_a_gpu_is_a_series() -> None:
    found = read(told(replace(EMPTY, gpus=(GPU0,))))
    for name, _, field in GPU_VALUES:
        assert found[f"gpu_{name}"] == [(LABELS0, float(getattr(GPU0, field) or 0))]
    assert [labels["reason"] for labels, _ in found["gpu_throttle_reason"]] == ["sw_power_cap", "hw_slowdown"]
    assert found["gpu_orphans"] == [(LABELS0, 0.0)]


def test_a_gpu_that_does_not_answer_has_no_value_not_its_last_one() -> None:
    silent = Gpu(uuid="GPU-0", index=0, error="NVML has not answered for 9 s")
    found = read(told(replace(EMPTY, gpus=(GPU0,)), replace(EMPTY, gpus=(silent,))))
    assert not [name for name in found if name.startswith("gpu_") and name not in ("gpu_orphans",)]


def test_the_series_of_processes_children_mounts_and_collectors() -> None:
    report = replace(
        EMPTY,
        processes=(process("7", 3, 12.0), process("7", 3, 40.0), process("7", None, 5.0), process("7", 1, None)),
        hung_probes=(
            HungProbe(probe="files:/shared:1000", seconds=50.0), HungProbe(probe="files:/shared:1001", seconds=80.0),
            HungProbe(probe="identify:4711", seconds=9.0),
        ),
        mounts=(MountProbe(mount='/odd "name"\\', responding=True, seconds=0.5),),
    )  # fmt: skip
    seen = Isolated(seconds={"process": 0.002, "gpu": 0.001}, failed={"gpu"})
    metrics = told(report, seen=seen, spool_bytes=77)
    metrics.count_report("sent")
    metrics.count_report("sent")
    metrics.count_tick(0.004)
    metrics.count_tick(2.0)
    found = read(metrics)
    assert found["process_uninterruptible_seconds"] == [
        ({"job_id": "7", "rank": ""}, 5.0), ({"job_id": "7", "rank": "3"}, 40.0),
    ]  # fmt: skip
    assert found["probe_hung"] == [({"probe": "files:/shared"}, 80.0), ({"probe": "identify"}, 9.0)]
    assert found["mount_probe_seconds"] == [({"mount": '/odd "name"\\'}, 0.5)]
    assert found["collector_success"] == [({"collector": "process"}, 1.0), ({"collector": "gpu"}, 0.0)]
    assert found["collector_duration_seconds"][0] == ({"collector": "process"}, 0.002)
    assert found["agent_reports_total"] == [({"outcome": "sent"}, 2.0)]
    assert found["spool_bytes"] == [({}, 77.0)]
    assert found["ticks_total"] == [({}, 2.0)]
    assert found["agent_tick_seconds"] == [({}, 2.0)]
    assert found["agent_build_info"][0][0]["node"] == "n1"


def test_node_events_are_counted_but_not_those_from_before_the_agents_start() -> None:
    event = NodeEvent(source="kernel_log", name="oom_kill", severity=FaultSeverity.ERROR, age_s=1.0, repeats=2)
    report = replace(EMPTY, node_events=(event, replace(event, backlog=True)))
    found = read(told(report, EMPTY))
    assert found["node_events_total"] == [({"name": "oom_kill", "severity": "error"}, 3.0)]


def test_what_is_not_read_yet_of_all_logs_adds_up() -> None:
    rows = (LogFile(job_id="7", path="/a", lag_bytes=5), LogFile(job_id="8", path="/b", lag_bytes=7))
    assert read(told(replace(EMPTY, logs=rows)))["log_lag_bytes"] == [({}, 12.0)]


def test_the_newest_checkpoint_of_a_job_counts_whatever_directory_it_lies_in() -> None:
    rows = (
        Checkpoint(job_id="7", directory="/a", step=100, age_s=50.0),
        Checkpoint(job_id="7", directory="/b", step=200, age_s=9.0, writing=True),
        Checkpoint(job_id="8", directory="/c"),
    )
    found = read(told(replace(EMPTY, checkpoints=rows)))
    assert found["checkpoint_age_seconds"] == [({"job_id": "7"}, 9.0)]


def test_orphans_are_those_of_whom_it_is_known() -> None:
    holder = GpuHolder(pid=9, start_ticks=1, uid=1, user="a", comm="x", state="S", gpu_uuids=("GPU-0",))
    report = replace(EMPTY, gpus=(GPU0,), gpu_holders=(holder, replace(holder, pid=10, orphan_for_s=70.0)))
    assert read(told(report))["gpu_orphans"] == [(LABELS0, 1.0)]


@pytest.mark.parametrize(
    ("probe", "label"),
    [
        ("identify:4711", "identify"), ("identify:stuck", "identify"), ("nvml", "nvml"), ("files:/a:1000", "files:/a"),
        ("files:/a:b:self", "files:/a:b"), ("files:/:0", "files:/"), ("probe:/shared", "probe:/shared"),
        ("anything:what a user wrote", "anything"),
    ],
)  # fmt: skip
def test_a_child_is_labelled_by_kind_and_mount_alone(probe: str, label: str) -> None:
    assert probe_label(probe) == label


def test_what_a_process_claims_to_be_its_job_is_no_label() -> None:
    assert [job_label(each) for each in ("123", "123_4", "", "x\ny", "9" * 40)] == [
        "123",
        "123_4",
        *["other"] * 3,
    ]


def test_no_metric_grows_without_limit() -> None:
    processes = tuple(process(str(number), 0, 5.0) for number in range(MAX_ROWS + 30))
    found = read(told(replace(EMPTY, processes=processes)))
    assert len(found["process_uninterruptible_seconds"]) == MAX_ROWS
    assert found["agent_series_dropped"] == [({}, 30.0)]


def test_the_file_is_written_now_and_then_for_everybody_to_read_and_goes_with_the_agent(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        metrics = AgentMetrics(str(tmp_path / "metrics"))
        metrics.count_tick(0.004)
        metrics.write(100.0)
    finally:
        os.umask(before)
    file = tmp_path / "metrics/slurm-watchdog.prom"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    assert "slurm_watchdog_agent_tick_seconds 0.004\n" in file.read_text()
    metrics.count_tick(0.5)
    metrics.write(100.0 + WRITE_S - 1)
    assert "slurm_watchdog_ticks_total 1\n" in file.read_text()
    metrics.count_tick(0.002)
    metrics.write(100.0 + WRITE_S)
    assert "slurm_watchdog_agent_tick_seconds 0.5\n" in file.read_text(), "the longest since it was written last"
    assert os.listdir(file.parent) == [file.name]
    metrics.remove()
    assert os.listdir(file.parent) == []
    metrics.remove()


def test_a_place_that_is_not_there_is_a_warning_and_no_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = AgentMetrics(str(tmp_path / "a/b"))
    metrics.write(0.0)
    metrics.write(WRITE_S)
    assert caplog.text.count("no metrics are written: ") == 1
    AgentMetrics("").write(0.0)


def test_the_gpus_of_a_job_can_be_joined_with_its_series() -> None:
    metrics = AgentMetrics()
    rank = Process(pid=41, start_ticks=1, job_id="7", role=Role.RANK, rank=3, comm="python", state="R", uid=0)
    worker = Process(pid=42, start_ticks=1, job_id="7", role=Role.WORKER, rank=3, comm="python", state="R", uid=0)
    card = Gpu(uuid="GPU-a", index=0, pids=(41, 42, 99))
    report = Report(
        node="n1",
        boot_id="b",
        agent_id="a",
        sequence=1,
        processes=(rank, worker),
        gpus=(card, Gpu(uuid="GPU-b", index=1)),
    )
    metrics.update(report, Isolated(), 0)
    rows = [line for line in metrics.render().decode().splitlines() if line.startswith("slurm_watchdog_gpu_job{")]
    assert rows == ['slurm_watchdog_gpu_job{gpu_uuid="GPU-a",gpu="0",job_id="7",rank="3"} 1']


def test_the_answer_of_a_mount_stays_until_the_next_one_and_goes_with_the_last_job() -> None:
    metrics = AgentMetrics()
    rank = Process(pid=41, start_ticks=1, job_id="7", role=Role.RANK, rank=3, comm="python", state="R", uid=0)
    answered = Report(
        node="n1", boot_id="b", agent_id="a", sequence=1, processes=(rank,),
        mounts=(MountProbe(mount="/scratch", responding=True, seconds=0.25),),
    )  # fmt: skip
    later, idle = (
        replace(answered, sequence=2, mounts=()),
        replace(answered, sequence=3, mounts=(), processes=()),
    )
    line = b'slurm_watchdog_mount_probe_seconds{mount="/scratch"} 0.25'
    shown = []
    for report in (answered, later, idle):
        metrics.update(report, Isolated(), 0)
        shown.append(line in metrics.render().splitlines())
    assert shown == [True, True, False]
