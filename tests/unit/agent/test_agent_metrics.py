"""The agent's /metrics: what Prometheus' own parser reads from it, what is never a label, and that nobody can
hold it up."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from slurm_watchdog.agent.collectors.collector import job_label
from slurm_watchdog.agent.collectors.gpu import GPU_VALUES
from slurm_watchdog.agent.metrics import MAX_REQUEST, MAX_ROWS, AgentMetrics, probe_label, serve
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
    metrics = AgentMetrics(lambda: {"idle": 2, "busy": 0, "hung": 1}, lambda: 0.004)
    for report in reports:
        metrics.update(report, seen or Isolated(), spool_bytes)
    return metrics


def process(job_id: str, rank: int | None, seconds: float | None) -> Process:
    blocked = None if seconds is None else Blocked(thread_id=1, seconds=seconds, state="D")
    return Process(
        pid=1, start_ticks=1, job_id=job_id, role=Role.RANK, comm="x", state="D", uid=0, rank=rank, blocked=blocked
    )  # fmt: skip


def xid(source: str, number: int = 79, **more: object) -> NodeEvent:
    fields: dict[str, object] = {
        "source": source,
        "name": "xid",
        "severity": FaultSeverity.CRITICAL,
        "age_s": 0.0,
    }
    return NodeEvent(**{**fields, "xid": number, **more})  # type: ignore[arg-type]


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
    assert found["nvml_driver_seconds"] == [({}, 0.004)]


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
    assert found["probes"][2] == ({"state": "hung"}, 1.0)
    assert found["ticks_total"] == [({}, 2.0)]
    assert found["agent_tick_duration_seconds_count"] == [({}, 2.0)]
    assert ({"le": "0.005"}, 1.0) in found["agent_tick_duration_seconds_bucket"]
    assert found["agent_tick_duration_seconds_sum"][0][1] == pytest.approx(2.004)


def test_one_fault_that_two_sources_tell_is_one_fault() -> None:
    first = replace(
        EMPTY,
        gpus=(GPU0,),
        node_events=(
            xid("kernel_log", pci_bus_id="0000:c1:00.0"), xid("nvml", gpu_uuid="GPU-0"),
            xid("kernel_log", 13, pci_bus_id="0000:c1:00.0", repeats=4), xid("nvml", 31, gpu_uuid="GPU-9"),
        ),
    )  # fmt: skip
    second = replace(EMPTY, gpus=(GPU0,), node_events=(xid("nvml", gpu_uuid="GPU-0"),))
    assert read(told(first, second))["gpu_xid_total"] == [
        ({**LABELS0, "xid": "13"}, 5.0), ({**LABELS0, "xid": "79"}, 2.0), ({"gpu_uuid": "GPU-9", "gpu": "", "xid": "31"}, 1.0),
    ]  # fmt: skip


def test_node_events_are_counted_but_not_those_from_before_the_agents_start() -> None:
    event = NodeEvent(source="kernel_log", name="oom_kill", severity=FaultSeverity.ERROR, age_s=1.0, repeats=2)
    report = replace(EMPTY, node_events=(event, replace(event, backlog=True)), node_events_dropped=9, events_dropped=4)
    found = read(told(report, EMPTY))
    assert found["node_events_total"] == [({"name": "oom_kill", "severity": "error"}, 3.0)]
    assert found["node_events_dropped_total"] == [({}, 9.0)]
    assert found["log_events_dropped_total"] == [({}, 4.0)]


def test_bytes_of_logs_that_were_passed_over_add_up_over_files_and_jobs() -> None:
    def logs(*rows: tuple[str, int, int]) -> Report:
        return replace(
            EMPTY, logs=tuple(LogFile(job_id="7", path=path, lag_bytes=lag, skipped_bytes=lost) for path, lag, lost in rows)
        )  # fmt: skip

    found = read(told(logs(("/a", 5, 100), ("/b", 7, 0)), logs(("/a", 0, 150)), logs(), logs(("/a", 0, 30))))
    assert found["log_skipped_bytes_total"] == [({}, 180.0)]
    assert found["log_lag_bytes"] == [({}, 0.0)]


def test_the_newest_checkpoint_of_a_job_counts_whatever_directory_it_lies_in() -> None:
    rows = (
        Checkpoint(job_id="7", directory="/a", step=100, age_s=50.0),
        Checkpoint(job_id="7", directory="/b", step=200, age_s=9.0, writing=True),
        Checkpoint(job_id="8", directory="/c"),
    )
    found = read(told(replace(EMPTY, checkpoints=rows)))
    assert found["checkpoint_step"] == [({"job_id": "7"}, 200.0)]
    assert found["checkpoint_age_seconds"] == [({"job_id": "7"}, 9.0)]
    assert found["checkpoint_writing"] == [({"job_id": "7"}, 1.0), ({"job_id": "8"}, 0.0)]


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


@pytest.fixture
def served() -> Iterator[int]:
    port = serve("127.0.0.1", 0, told(replace(EMPTY, gpus=(GPU0,))).render)
    assert port is not None
    yield port


def scrape(port: int, path: str = "/metrics") -> tuple[int, str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=180) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_prometheus_gets_what_it_asks_for(served: int) -> None:
    status, content_type, text = scrape(served)
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'slurm_watchdog_gpu_power_watts{gpu_uuid="GPU-0",gpu="0"} 653.25\n' in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(served, "/secret")


@pytest.mark.parametrize("words", [b"", b"GET /met", b"\0" * 50, b"x" * (MAX_REQUEST + 9), b"\r\n\r\n", b"GET\r\n\r\n"])
def test_a_strange_client_holds_the_next_one_up_for_two_seconds_at_most(served: int, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served)) as strange:
        strange.sendall(words)
        began = time.monotonic()
        assert scrape(served)[0] == 200
        assert time.monotonic() - began < 4


def test_a_port_that_is_taken_is_a_warning_and_no_end(served: int) -> None:
    assert serve("127.0.0.1", served, AgentMetrics().render) is None


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
