"""What NVML says becomes a row: units, names, and nothing made up."""

from __future__ import annotations

from typing import Any

import pytest

from watchdog.agent.collectors.gpu import THROTTLE, parse_bus_id, parse_gpu, parse_throttle, without_values
from watchdog.model import Gpu, Report
from watchdog.wire import decode_report, encode_report

ROW: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-aaaa",
    "bus_id": "00000000:C1:00.0",
    "minor": 5,
    "name": "NVIDIA H100 80GB HBM3",
    "utilization_percent": 97,
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 2619,
    "power_mw": 653_250,
    "temperature_c": 61,
    "memory_bytes": [40, 80],
    "throttle_mask": 0x44,
    "pids": [4712, 4711, 4711],
}


def test_a_whole_row_has_si_units_and_the_kernels_address() -> None:
    assert parse_gpu(ROW) == Gpu(
        uuid="GPU-aaaa",
        index=0,
        pci_bus_id="0000:c1:00.0",
        minor=5,
        name="NVIDIA H100 80GB HBM3",
        utilization_ratio=0.97,
        sm_clock_hz=1.98e9,
        memory_clock_hz=2.619e9,
        power_w=653.25,
        temperature_c=61.0,
        memory_used_bytes=40,
        memory_total_bytes=80,
        throttle=("sw_power_cap", "hw_thermal_slowdown"),
        pids=(4711, 4712),
    )


def test_what_is_absent_is_unknown_and_not_zero() -> None:
    gpu = parse_gpu({"index": 3, "error": "NVML_ERROR_GPU_IS_LOST: GPU is lost"})
    assert gpu == Gpu(uuid="", index=3, error="NVML_ERROR_GPU_IS_LOST: GPU is lost")
    assert (gpu.utilization_ratio, gpu.throttle, gpu.pids, gpu.minor) == (None, None, None, None)
    assert (
        parse_gpu({**ROW, "utilization_percent": 0, "pids": [], "throttle_mask": 0}).utilization_ratio == 0.0
    )


def test_a_gpu_without_values_keeps_only_who_it_is() -> None:
    assert without_values(parse_gpu(ROW), "gone") == Gpu(
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
        key.lower()
        .removeprefix("nvmlclocks")
        .removeprefix("event")
        .removeprefix("throttle")
        .removeprefix("reason")
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
        parse_gpu(ROW),
        parse_gpu({**ROW, "throttle_mask": 0, "pids": []}),
        Gpu(uuid="", index=2, error="lost"),
    )
    report = Report(node="n1", boot_id="b", agent_id="a", sequence=1, gpus=gpus)
    assert decode_report(encode_report(report)) == report
    assert report.gpus[1].throttle == () == report.gpus[1].pids
