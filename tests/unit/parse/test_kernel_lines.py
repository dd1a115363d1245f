"""Lines of the kernel: each row of the knowledge has a line that it reads, and no healthy machine is ill."""

from __future__ import annotations

import re

import pytest

from slurm_watchdog.knowledge.entries import DATA, parse_entries, parts_of
from slurm_watchdog.knowledge.kernel_signatures import SIGNATURES, USER_TEXT, Signature, UserText
from slurm_watchdog.model.observations import FaultSeverity
from slurm_watchdog.parse.kernel_log.file import parse_record, readable, split_line
from slurm_watchdog.parse.kernel_log.line import (
    FREE_GATES,
    MAX_LINE,
    KernelFact,
    is_interesting,
    parse_message,
)
from tests.builders.forged_kernel_lines import SAMPLES, Case, captured, fields_of, forgeries, signature_cases
from tests.builders.kernel_messages import parse_kernel_line

PCI = parts_of(parse_entries((DATA / "kernel_signatures.conf").read_text(), "")[0])["PCI"]


def pasted_cases() -> list[Case]:
    rows = [line.split("|", 2) for line in captured("pasted.txt")]
    return [Case(name.strip(), None, False, fields_of(fields), line[1:]) for name, fields, line in rows]


def check_fields(case: Case, fact: KernelFact) -> None:
    wrong = {key: getattr(fact, key) for key, value in case.fields.items() if str(getattr(fact, key)) != value}
    assert not wrong, f"{wrong} in {fact}"


@pytest.mark.parametrize("case", signature_cases(), ids=lambda case: f"{case.name}: {case.line[:60]}")
def test_a_row_reads_the_lines_it_is_for(case: Case) -> None:
    fact = parse_message(case.line)
    assert fact is not None
    assert (fact.name, fact.severity, fact.may_exclude_node) == (case.name, case.severity, case.exclude)
    check_fields(case, fact)
    assert is_interesting(case.line.encode()), "the cheap filter must let through what the rows can read"


@pytest.mark.parametrize("case", pasted_cases(), ids=lambda case: case.line[:60])
def test_a_line_is_read_with_the_prefix_people_paste_it_with(case: Case) -> None:
    fact = parse_kernel_line(case.line)
    assert fact is not None
    assert fact.name == case.name
    check_fields(case, fact)


@pytest.mark.parametrize("line", captured("healthy.txt"), ids=lambda line: line[:70])
def test_a_healthy_line_is_nothing_or_news(line: str) -> None:
    fact = parse_kernel_line(line)
    assert fact is None or (fact.severity is FaultSeverity.INFO and not fact.may_exclude_node), fact


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.name)
def test_a_row_is_well_formed(row: Signature) -> None:
    assert row.needles and all(needle == needle.lower() for needle in row.needles)
    assert all(head == head.lower() and len(head) == 3 for head in row.heads)
    assert re.fullmatch(r"[a-z][a-z0-9_]*", row.name)
    assert row.heads or all(any(gate in needle.encode() for gate in FREE_GATES) for needle in row.needles)
    if row.may_exclude_node:
        assert row.severity is FaultSeverity.CRITICAL
        assert not row.consequence


@pytest.mark.parametrize(
    "prefix",
    ["nfs", "lustre", "lnet", "gpfs", "ceph", "cifs", "afs", "beegfs", "weka", "fuse", "gfs2", "oom", "segfault", "filesystem",
     "journal", "no_space", "hung", "link", "core_dump", "page_alloc", "kernel", "clock", "pids", "raid", "disk", "nmi", "pcie_corrected", "memory_corrected",
     "iommu"],
)  # fmt: skip
def test_no_filesystem_program_link_or_user_excludes_a_node(prefix: str) -> None:
    rows = [row for row in SIGNATURES if row.name.startswith(prefix)]
    assert rows
    assert not any(row.may_exclude_node for row in rows)


def test_a_name_that_looks_like_a_fault_is_still_only_a_name() -> None:
    fact = parse_message("kernel BUG at a[12]: segfault at 0 ip 0000 sp 0000 error 4 in python3[1+1]")
    assert fact is not None
    assert fact.name == "segfault"
    assert parse_message("process 'NVRM: Xid (PCI:0000:c1:00): 79, x' launched") is None


def test_a_record_says_who_wrote_it_and_when() -> None:
    record = parse_record(b"6,339,5140900,-;NET: Registered\n SUBSYSTEM=net\n DEVICE=n1\n")
    assert record is not None
    assert (record.facility, record.level, record.sequence, record.time_us) == (0, 6, 339, 5140900)
    assert record.message == b"NET: Registered"
    user = parse_record(b"11,340,1,-;x")
    assert user is not None
    assert user.facility == 1


@pytest.mark.parametrize("data", [b"", b";", b"x;y", b"1,2;y", b"1,2,x,-;y", b"\xff\xfe\x00", b"6,339,5140900,-"])
def test_parse_record_of_invalid_bytes_is_none(data: bytes) -> None:
    assert parse_record(data) is None


def test_escapes_are_undone_and_control_characters_are_spaces() -> None:
    assert readable(rb"a\xff\xfe\x01b\x5cx\x0asecond line\x09q") == "a�� b\\x second line q"
    assert readable(b"caf\\xc3\\xa9") == "café"


def test_a_line_of_a_megabyte_is_bounded() -> None:
    fact = parse_kernel_line("NVRM: Xid (PCI:0000:c1:00): 79, " + "x" * 2**20)
    assert fact is not None
    assert len(fact.message) <= MAX_LINE


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "[", "[1", "<", "<6", ";", "6,1,1,-;", "kernel: ", "[ 1.0] ", "Sep 19 02:29:46 "]
)
def test_a_line_of_nothing_is_none(text: str) -> None:
    assert parse_kernel_line(text) is None


@pytest.mark.parametrize("address", ["x", "::", "0000", "", "zz:00:00.0", "0000:00:01.9"])
def test_an_address_that_is_none_is_left_out(address: str) -> None:
    fact = parse_kernel_line(f"pcieport {address}: AER: Corrected error received")
    assert fact is None or fact.pci_bus_id is None


def test_colours_of_a_terminal_are_not_in_the_way() -> None:
    fact = parse_kernel_line(
        "\x1b[32m[ 8593.497005] \x1b[0m\x1b[33mnfs: \x1b[0mserver nas01 not responding, still trying"
    )
    assert fact is not None
    assert (fact.name, fact.server) == ("nfs_server_silent", "nas01")


def test_a_program_is_not_the_kernel() -> None:
    assert split_line("11,1,1,-;NVRM: Xid") is None
    found = split_line("Sep 19 02:29:46 n kernel: [1.0] NVRM: x")
    assert found is not None and found.text == "NVRM: x"


HOSTILE = ["NVRM: The NVIDIA GPU 0000:18:00.0 " + "NVRM: " * 600 + "fallen off the bu", "a" * 4000, "0000:" * 800, "nfs: server " + "x" * 4000, "LustreError: " + "rc = " * 800, "[" * 4000, "NVRM: " + "GPU " * 900,
           "EXT4-fs (" + "a" * 4000, "x" * 60 + "[" + "1" * 4000, "ceph: [" + "a " * 2000, "eth0: " * 600 + "NIC Link is Dow",
           "amdgpu 0000:c1:00.0: " + "1 new " * 700, "mce: [Hardware Error]: " * 180, "link is : link " * 250]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_no_line_costs_more_than_a_bounded_number_of_steps(text: str) -> None:
    """Regular expressions that go back and forth over a long line would take minutes here: the test would not end."""
    assert parse_message(text) is None or isinstance(parse_message(text), KernelFact)


# ---------------------------------------------------------------------------------------- words of users


def test_no_words_of_a_user_are_taken_for_those_of_a_driver() -> None:
    assert forgeries() == []


@pytest.mark.parametrize("form", USER_TEXT, ids=lambda form: form.name)
def test_each_form_of_a_line_with_a_user_s_words_is_the_one_of_its_samples(form: UserText) -> None:
    for sample in SAMPLES[form.name]:
        line = sample.format(comm="python", file="model.so", pid=12, ifname="veth0")
        assert form.regex.match(line)
        fact = parse_message(line)
        assert fact is None or fact.name in form.rows
    assert form.rows <= {row.name for row in SIGNATURES}


@pytest.mark.parametrize("row", [row for row in SIGNATURES if row.may_exclude_node], ids=lambda row: row.name)
def test_a_row_that_may_take_a_node_away_has_a_prefix_that_no_program_s_name_can_be(row: Signature) -> None:
    """Either the device's address stands behind the driver's name, or nothing may stand between the driver's words."""
    addressed = PCI in row.regex.pattern and f"(?:{PCI}" not in row.regex.pattern
    loose = ".*" in row.regex.pattern
    assert addressed or not loose or row.regex.pattern.startswith("Kernel panic - not syncing: ")
    assert row.highest_level <= 4 or addressed or row.regex.pattern.startswith("pcieport ")


def test_kernel_line_of_informational_level_excludes_no_node() -> None:
    line = "nvme nvme4: Disabling device after reset failure: -19"
    for level, excludes in ((3, True), (4, True), (6, False), (None, True)):
        fact = parse_message(line, level)
        assert fact is not None
        assert fact.may_exclude_node is excludes


def test_a_program_s_name_makes_no_fatal_error_of_an_xid() -> None:
    fact = parse_message("NVRM: Xid (PCI:0000:0f:00): 74, pid=12, name=x, fatal error, Ch 00000008", 4)
    assert fact is not None
    assert not fact.may_exclude_node


def test_the_process_of_an_oom_kill_is_the_last_that_is_named_not_one_in_a_group_s_name() -> None:
    line = (
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,task=victim,pid=99,uid=0,mems_allowed=0,"
        "oom_memcg=/x,task_memcg=/x,task=python,pid=12,uid=1500"
    )
    fact = parse_message(line)
    assert fact is not None
    assert (fact.process, fact.pid) == ("python", 12)


@pytest.mark.parametrize("disk", ["fd0", "sr0"])
def test_an_empty_drive_for_floppies_or_cds_is_no_disk_that_fails(disk: str) -> None:
    for line in ("blk_update_request: I/O error, dev {}, sector 0", "Buffer I/O error on dev {}, logical block 0"):
        assert parse_message(line.format(disk)) is None
        assert parse_message(line.format("sda")) is not None
