"""What NVML says becomes a row: units, names, and nothing made up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import GpuHealthRow, GpuRow
from slurm_watchdog.agent.gpu.nvml import THROTTLE, parse_bus_id, parse_throttle
from slurm_watchdog.agent.gpu.nvml_health import TABLE
from slurm_watchdog.agent.gpu.reader import (
    ECC_EVENT,
    XID_EVENT,
    make_gpu,
    parse_event,
    without_values,
)
from slurm_watchdog.knowledge.xids import XIDS, describe_xid
from slurm_watchdog.model.observations import FaultSeverity, Gpu, MigInstance, NodeEvent
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import decode_report, encode_report

ROW = GpuRow(
    index=0, uuid="GPU-aaaa", pci_bus_id="0000:c1:00.0", minor=5, name="NVIDIA H100 80GB HBM3",
    utilization_ratio=0.97, sm_clock_hz=1.98e9, power_w=653.25, temperature_c=61.0, memory_used_bytes=40,
    memory_total_bytes=80, throttle=("sw_power_cap", "hw_thermal_slowdown"),
)  # fmt: skip
PROCESSES = ((4712, 7), (4711, 5))
HEALTH: dict[str, Any] = {
    "memory_clock_hz": 2.619e9,
    "ecc_corrected": 3,
    "ecc_uncorrected": 1,
    "remapped_rows_corrected": 2,
    "remapped_rows_uncorrected": 4,
    "remap_pending": True,
    "remap_failed": False,
    "retired_pages": 6,
    "retired_pages_pending": False,
    "pcie_link_width": 8,
    "pcie_link_width_max": 16,
    "pcie_link_generation": 1,
    "pcie_link_generation_max": 5,
    "pcie_replays": 9,
    "nvlinks_active": 17,
    "nvlinks_down": 1,
    "nvlink_errors": 12,
    "mig": (
        MigInstance(uuid="MIG-a", gpu_instance=1, compute_instance=0, memory_used_bytes=10, memory_total_bytes=20),
    ),
}


def test_a_row_of_the_child_with_its_processes_is_the_gpu() -> None:
    assert make_gpu(replace(ROW, processes=PROCESSES)) == Gpu(
        uuid="GPU-aaaa",
        index=0,
        pci_bus_id="0000:c1:00.0",
        minor=5,
        name="NVIDIA H100 80GB HBM3",
        utilization_ratio=0.97,
        sm_clock_hz=1.98e9,
        power_w=653.25,
        temperature_c=61.0,
        memory_used_bytes=40,
        memory_total_bytes=80,
        throttle=("sw_power_cap", "hw_thermal_slowdown"),
        pids=(4711, 4712),
        process_memory_bytes=(5, 7),
    )


def test_what_is_absent_is_unknown_and_not_zero() -> None:
    gpu = make_gpu(GpuRow(uuid="", index=3, error="NVML_ERROR_GPU_IS_LOST: GPU is lost"))
    assert gpu == Gpu(uuid="", index=3, error="NVML_ERROR_GPU_IS_LOST: GPU is lost")
    assert (gpu.utilization_ratio, gpu.throttle, gpu.pids, gpu.minor) == (None, None, None, None)
    idle = make_gpu(replace(ROW, utilization_ratio=0.0, throttle=(), processes=()))
    assert (idle.utilization_ratio, idle.throttle, idle.pids, idle.process_memory_bytes) == (0.0, (), (), ())


@pytest.mark.parametrize(
    ("listed", "pids", "held"),
    [
        ([[9, None], [4, 2]], (4, 9), (2, None)),
        ([[4, 2], [4, 3]], (4,), (5,)),  # two slices of one GPU
        ([[4, None], [4, 3]], (4,), (3,)),
        ([[4, 3], [4, None]], (4,), (3,)),
        ([[4, None], [4, None]], (4,), (None,)),
    ],
)
def test_processes_are_in_the_order_of_their_memory(listed: Any, pids: Any, held: Any) -> None:
    gpu = make_gpu(replace(ROW, processes=tuple(map(tuple, listed))))
    assert (gpu.pids, gpu.process_memory_bytes) == (pids, held)


@pytest.mark.parametrize("name", sorted(name for names, _ in TABLE for name in names))
def test_every_slow_value_has_its_field(name: str) -> None:
    gpu = make_gpu(replace(ROW, health=GpuHealthRow(**{name: HEALTH[name]})))
    if name == "mig":
        slice_ = MigInstance(
            uuid="MIG-a", gpu_instance=1, compute_instance=0, memory_used_bytes=10, memory_total_bytes=20
        )
        assert gpu.mig == (slice_,)
    else:
        assert getattr(gpu, name) == HEALTH[name]
    others = [each for names, _ in TABLE for each in names if each != name]
    assert all(getattr(gpu, each) is None for each in others)


@pytest.mark.parametrize("number", sorted(XIDS))
def test_an_xid_event_carries_what_the_table_says_of_it(number: int) -> None:
    row = describe_xid(number)
    event = parse_event(XID_EVENT, number, make_gpu(ROW), age_s=1.5, repeats=2)
    assert event == NodeEvent(
        source="nvml",
        name="xid",
        severity=row.severity,
        age_s=1.5,
        line=event.line,
        repeats=2,
        xid=number,
        gpu_uuid="GPU-aaaa",
        pci_bus_id="0000:c1:00.0",
        may_exclude_node=row.may_exclude_node,
    )
    assert str(number) in event.line and row.name in event.line


def test_an_event_without_a_known_gpu_or_of_another_kind_accuses_nobody() -> None:
    assert parse_event(XID_EVENT, 4242, None, 0.0).gpu_uuid is None
    assert parse_event(XID_EVENT, 4242, None, 0.0).may_exclude_node is False
    assert parse_event(XID_EVENT, 13, None, 0.0, uuid="MIG-x").gpu_uuid == "MIG-x"
    ecc = parse_event(ECC_EVENT, 0, make_gpu(ROW), 0.0)
    assert (ecc.name, ecc.severity, ecc.xid) == ("gpu_ecc_uncorrected", FaultSeverity.ERROR, None)
    assert parse_event(0x40, 0, None, 0.0).name == "nvml_event_0x40"


def test_a_gpu_without_values_keeps_only_who_it_is() -> None:
    assert without_values(make_gpu(ROW), "gone") == Gpu(
        uuid="GPU-aaaa",
        index=0,
        pci_bus_id="0000:c1:00.0",
        minor=5,
        name="NVIDIA H100 80GB HBM3",
        error="gone",
    )


@pytest.mark.parametrize(("bit", "name"), THROTTLE.items())
def test_every_throttle_bit_has_its_name(bit: int, name: str) -> None:
    pynvml = pytest.importorskip("pynvml")
    theirs = [key for key in dir(pynvml) if key.startswith("nvmlClocks") and getattr(pynvml, key) == bit]
    assert name.replace("_", "") in {
        key.lower().removeprefix("nvmlclocks").removeprefix("event").removeprefix("throttle").removeprefix("reason")
        for key in theirs
    }
    assert parse_throttle(bit) == (name,)


def test_a_throttle_mask_is_a_set_of_bits_and_unknown_ones_are_told() -> None:
    assert parse_throttle(0) == ()
    assert parse_throttle(0x8 | 0x1 | 1 << 40) == ("gpu_idle", "hw_slowdown", "bit_40")


@pytest.mark.parametrize(
    ("nvml", "kernel"),
    [
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("0000:07:00.0", "0000:07:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
    ],
)
def test_a_pci_address_is_written_as_the_kernel_does(nvml: str, kernel: str) -> None:
    assert parse_bus_id(nvml) == kernel


def test_a_report_with_gpus_survives_the_wire() -> None:
    gpus = (
        make_gpu(ROW),
        make_gpu(replace(ROW, throttle=(), processes=())),
        make_gpu(replace(ROW, processes=PROCESSES, health=GpuHealthRow(**HEALTH))),
        Gpu(uuid="", index=2, error="lost"),
    )
    report = Report(node="n1", boot_id="b", agent_id="a", sequence=1, gpus=gpus)
    assert decode_report(encode_report(report)) == report
    assert report.gpus[1].throttle == () == report.gpus[1].pids
