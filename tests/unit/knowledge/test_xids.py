"""The table of NVIDIA's faults: complete where it matters, careful where it accuses."""

from __future__ import annotations

import pytest

from slurm_watchdog.knowledge.entries import read_shipped
from slurm_watchdog.knowledge.log_signatures import SIGNATURES
from slurm_watchdog.knowledge.xids import XIDS, describe_xid, nvlink_row, xid_row
from slurm_watchdog.model.observations import FaultSeverity


def test_no_number_is_described_twice() -> None:
    rows = read_shipped("xids.conf", {"xid": xid_row, "nvlink": nvlink_row})["xid"]
    assert len(XIDS) == len(rows)
    assert all(number == row.number for number, row in XIDS.items())


def test_the_signatures_of_logs_name_each_xid_of_lost_gpus_and_of_their_memory() -> None:
    memory = {48, 57, 58, 64, 94, 95, 140, 171, 172}
    critical = {each.number for each in XIDS.values() if (each.blame, each.severity) == ("hardware", "critical")}
    for name, numbers in (("gpu_ecc", memory), ("gpu_lost", critical - memory)):
        row = next(row for row in SIGNATURES if row.name == name)
        named = {number for number in XIDS if row.regex.search(f"NVRM: Xid (PCI:0000:18:00): {number}, pid=1")}
        assert named == numbers


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_xid_of_an_application_never_excludes_a_node(number: int) -> None:
    row = describe_xid(number)
    assert row.blame == "application"
    assert not row.may_exclude_node
    assert row.severity is FaultSeverity.WARNING


@pytest.mark.parametrize("number", [48, 63, 64, 74, 79, 92, 94, 95, 119, 120])
def test_xid_of_hardware_says_so(number: int) -> None:
    assert describe_xid(number).blame == "hardware"


@pytest.mark.parametrize("number", [46, 48, 62, 64, 79, 95, 119, 120, 140, 143, 158, 171, 172, 173])
def test_a_gpu_that_is_broken_or_needs_a_reset_may_exclude_its_node(number: int) -> None:
    row = describe_xid(number)
    assert row.may_exclude_node
    assert row.severity is FaultSeverity.CRITICAL


@pytest.mark.parametrize("number", [63, 92, 93, 94, 121, 154, 156, 176])
def test_xid_that_was_corrected_contained_or_recorded_excludes_nothing(number: int) -> None:
    assert not describe_xid(number).may_exclude_node


@pytest.mark.parametrize("row", XIDS.values(), ids=lambda row: str(row.number))
def test_only_hardware_that_is_certainly_broken_excludes_a_node(row: object) -> None:
    assert isinstance(row, type(describe_xid(79)))
    if row.may_exclude_node:
        assert row.blame == "hardware"
        assert row.severity is FaultSeverity.CRITICAL
        assert not row.consequence
    assert row.name.replace("_", "").isalnum() and row.name == row.name.lower()
    assert row.text and not row.text.endswith(".")


@pytest.mark.parametrize("number", [43, 45, 154])
def test_a_consequence_is_known_as_one(number: int) -> None:
    assert describe_xid(number).consequence


@pytest.mark.parametrize("number", [0, -1, 1, 91, 177, 999, 10**9])
def test_an_unknown_number_blames_nobody(number: int) -> None:
    row = describe_xid(number)
    assert (row.number, row.name, row.blame, row.may_exclude_node) == (number, "unknown", "either", False)
    assert str(number) in row.text
