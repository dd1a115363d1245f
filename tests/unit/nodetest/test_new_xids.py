"""Xids before and after a test: those of the load count by what their number says; an unreadable log is unknown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.probes.kernel_log import parse_records, xid_facts
from slurm_watchdog.nodetest.results import Fact
from tests.builders.measured_nodes import node

UUID = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
FELL = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
USERS = "12,340,5140901,-;systemd[1]: NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.\n"
"""From tests/captures/kernel/pasted.txt: a program wrote it."""


def record(sequence: int, text: str, priority: int = 4) -> bytes:
    return f"{priority},{sequence},5140902,-;{text}\n SUBSYSTEM=pci\n".encode()


def test_lines_of_the_kernel_are_kept_with_their_sequence_and_those_of_programs_are_not() -> None:
    facts = parse_records([record(338, "eth0: link up"), USERS.encode(), record(341, FELL), b"garbage"])
    assert facts == {"kernel_log_at": 341, "xid_341": {"sequence": 341, "text": FELL}}
    many = parse_records(record(at, FELL) for at in range(100))
    assert len(many) == 21
    assert "xid_99" in many


def test_a_log_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert xid_facts(str(tmp_path / "kmsg")) == {"kernel_log": "unknown: No such file or directory"}
    (tmp_path / "empty").touch()
    assert xid_facts(str(tmp_path / "empty")) == {"kernel_log": "unknown: it is empty"}


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log cannot be read here")
def test_the_log_of_this_machine_is_read_to_its_end() -> None:
    assert {"kernel_log_at", "kernel_log"} & set(xid_facts())


def verdict(*texts: str, at: int = 340, readable: bool = True) -> tuple[Truth, str, str]:
    """Of a node with one card, on which the kernel logged these after record `at`; with its place."""
    card: Fact = {"uuid": UUID, "bus": "00000000:C1:00.0"}
    before: dict[str, Fact] = {"gpus": 1, "gpu_0": card, "xid_5": {"sequence": 5, "text": FELL}}
    after = dict(before) | {f"xid_{at + i}": {"sequence": at + i, "text": text} for i, text in enumerate(texts, 1)}
    if readable:
        before["kernel_log_at"] = 340
    facts = {"gpu_health before": before, "gpu_health after": after}
    (found,) = judge_nodes([node("n1", facts=facts)], {"cpu_core": 1.0}, {})
    return found.truth, " ".join(found.reasons), found.faults[0].place if found.faults else ""


def test_a_gpu_that_falls_off_the_bus_under_the_load_is_named_by_its_uuid() -> None:
    truth, words, place = verdict(FELL)
    assert (truth, place) == (Truth.BAD, UUID)
    assert words == "GPU 0: Xid 79 during the test (gpu_off_the_bus)"


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("NVRM: Xid (PCI:0000:c1:00): 31, pid=4242, name=python, MMU Fault", Truth.OK),  # a program's own
        ("NVRM: Xid (PCI:0000:c1:00): 45, pid=4242, name=python, Ch 00000010", Truth.OK),  # a consequence
        ("NVRM: Xid (PCI:0000:c1:00): 63, Row Remapper: New row marked for remapping", Truth.UNKNOWN),
    ],
)
def test_what_a_program_causes_is_left_out_and_what_is_no_proof_is_a_doubt(text: str, truth: Truth) -> None:
    assert verdict(text)[0] is truth


def test_a_xid_from_before_the_test_or_without_a_log_before_it_is_held_against_nobody() -> None:
    assert verdict()[0] is Truth.OK
    assert verdict(FELL, at=300)[0] is Truth.OK
    assert verdict(FELL, readable=False)[0] is Truth.OK
