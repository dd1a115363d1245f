"""What NVML says becomes a row: units, names, and nothing made up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.gpu.nvml_values import THROTTLE, VALUES, by_pid, parse_bus_id, parse_throttle
from slurm_watchdog.agent.gpu.reader import (
    ECC_EVENT,
    XID_EVENT,
    parse_event,
    without_values,
)
from slurm_watchdog.knowledge.xids import XIDS, describe_xid
from slurm_watchdog.model.observations import FaultSeverity, Gpu, MigInstance, NodeEvent
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import decode_report, encode_report

ROW = Gpu(
    index=0, uuid="GPU-aaaa", pci_bus_id="0000:c1:00.0", minor=5, name="NVIDIA H100 80GB HBM3",
    utilization_ratio=0.97, sm_clock_hz=1.98e9, power_w=653.25, temperature_c=61.0, memory_used_bytes=40,
    memory_total_bytes=80, throttle=("sw_power_cap", "hw_thermal_slowdown"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "held"),
    [
        ([(9, None), (4, 2)], {4: 2, 9: None}),
        ([(4, 2), (4, 3)], {4: 5}),  # two slices of one GPU
        ([(4, None), (4, 3)], {4: 3}),
        ([(4, 3), (4, None)], {4: 3}),
        ([(4, None), (4, None)], {4: None}),
    ],
)
def test_the_memory_of_each_process_is_summed_up_in_the_order_of_pids(listed: Any, held: Any) -> None:
    assert list(by_pid(listed).items()) == list(held.items())


def test_every_value_that_is_read_has_its_field_once() -> None:
    names = [name for value in VALUES for name in value.fields]
    assert set(names) <= set(Gpu.__struct_fields__)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("number", sorted(XIDS))
def test_an_xid_event_carries_what_the_table_says_of_it(number: int) -> None:
    row = describe_xid(number)
    event = parse_event(XID_EVENT, number, ROW, age_s=1.5, repeats=2)
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
    ecc = parse_event(ECC_EVENT, 0, ROW, 0.0)
    assert (ecc.name, ecc.severity, ecc.xid) == ("gpu_ecc_uncorrected", FaultSeverity.ERROR, None)
    assert parse_event(0x40, 0, None, 0.0).name == "nvml_event_0x40"


def test_a_gpu_without_values_keeps_only_who_it_is() -> None:
    assert without_values(ROW, "gone") == Gpu(
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
    slices = (MigInstance(uuid="MIG-a", gpu_instance=1, compute_instance=0, memory_used_bytes=1, memory_total_bytes=2),)
    gpus = (
        ROW,
        replace(ROW, throttle=(), pids=()),
        replace(ROW, pids=(4711,), process_memory_bytes=(None,), ecc_corrected=3, remap_failed=False, mig=slices),
        Gpu(uuid="", index=2, error="lost"),
    )
    report = Report(node="n1", boot_id="b", agent_id="a", sequence=1, gpus=gpus)
    assert decode_report(encode_report(report)) == report
    assert report.gpus[1].throttle == () == report.gpus[1].pids
