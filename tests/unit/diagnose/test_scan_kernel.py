"""`scan-log --kernel`: every form in which a kernel log is handed over, cause before consequence, and no
healthy node excluded."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.cli.options import print_json
from slurm_watchdog.cli.scan_log import read_kernel_logs
from slurm_watchdog.diagnose.kernel_log.verdict import JudgedLine, KernelScan, judge_file
from slurm_watchdog.knowledge.kernel_causes import ENDS, RULES
from slurm_watchdog.knowledge.kernel_signatures import SIGNATURES
from slurm_watchdog.knowledge.xids import XIDS
from slurm_watchdog.parse.kernel_log.file import kernel_text_of, parse_time
from tests.builders.kernel_messages import read_messages


def scan_kernel(paths: list[str], *, as_json: bool) -> object:
    """The exit code; what is printed is captured."""
    answer = read_kernel_logs(paths)
    print_json(answer.document) if as_json else answer.tell()
    return answer.code


BUS = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def judged(text: str) -> list[JudgedLine]:
    return list(judge_file(read_messages(text.splitlines())).lines)


def by_line(text: str) -> dict[int, JudgedLine]:
    return {line.number: line for line in judged(text)}


FORMS = {
    "bare": BUS,
    "dmesg": f"[ 8593.497005] {BUS}",
    "dmesg -T": f"[Thu Sep 19 02:29:46 2024] {BUS}",
    "dmesg -T in Japanese": f"[木  9月 19 02:29:46 2024] {BUS}",
    "dmesg -T in German": f"[Do Sep 19 02:29:46 2024] {BUS}",
    "dmesg -d": f"[ 8593.497005 <    0.000012>] {BUS}",
    "dmesg --time-format iso": f"2024-09-19T02:29:46,123456+09:00 {BUS}",
    "dmesg -x": f"kern  :err   : [ 8593.497005] {BUS}",
    "dmesg --json": f'         "msg": "{BUS}"',
    "syslog": f"Sep 19 02:29:46 node-7 kernel: [ 8593.497005] {BUS}",
    "journalctl -o short-iso": f"2024-09-19T02:29:46+0000 node-7 kernel: {BUS}",
    "journalctl -o json": json.dumps({"_TRANSPORT": "kernel", "_HOSTNAME": "node-7", "MESSAGE": BUS, "__REALTIME_TIMESTAMP": "1726712986123456"}),
    "journalctl -o json, bytes": json.dumps({"_TRANSPORT": "kernel", "MESSAGE": list(BUS.encode())}),
    "journalctl -o export": f"MESSAGE={BUS}",
    "/dev/kmsg": f"3,4982,8593497005,-;{BUS}",
    "pdsh": f"node-7: [ 8593.497005] {BUS}",
    "pdsh without a time": f"node-7: {BUS}",
    "grep -n": f"1234:[ 8593.497005] {BUS}",
    "rsyslog's repetition": f"Sep 19 02:29:46 node-7 kernel: message repeated 9 times: [ {BUS}]",
    "a quotation": f"> [ 8593.497005] {BUS}",
    "an indented block": f"    [ 8593.497005] {BUS}",
    "code in a list": f"- `[ 8593.497005] {BUS}`",
    "carriage returns": f"[ 8593.497005] {BUS}\r",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_line_is_read_in_every_form_in_which_it_is_handed_over(form: str) -> None:
    (line,) = judged(FORMS[form])
    assert (line.class_name, line.fact.pci_bus_id, line.may_exclude_node) == (
        "gpu_off_the_bus",
        "0000:c1:00.0",
        True,
    )


@pytest.mark.parametrize(
    "form", ["syslog", "journalctl -o short-iso", "journalctl -o json", "pdsh", "pdsh without a time"]
)
def test_the_node_is_taken_from_the_line(form: str) -> None:
    (line,) = judged(FORMS[form])
    assert line.node == "node-7"


def test_scan_kernel_ignores_programs_that_imitate_kernel_lines() -> None:
    assert not judged(f"Sep 19 02:29:46 node-7 myprog[12]: {BUS}")
    assert not judged(json.dumps({"_TRANSPORT": "stdout", "SYSLOG_IDENTIFIER": "train", "MESSAGE": BUS}))
    assert not judged(f"11,4982,8593497005,-;{BUS}")


def test_a_file_in_front_of_a_line_is_no_node() -> None:
    (line,) = judged(f"/var/log/kern.log:[ 8593.497005] {BUS}")
    assert line.node is None


def test_scan_kernel_takes_lines_after_a_lost_gpu_for_its_consequences() -> None:
    lines = by_line(
        "\n".join(
            [
                f"[ 8593.497005] {BUS}",
                "[ 8593.497035] NVRM: GPU 0000:c1:00.0: GPU has fallen off the bus.",
                "[ 8593.6] NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x0 (None) "
                "to 0x1 (GPU Reset Required)",
                "[ 8594.6] NVRM: Xid (PCI:0000:3b:00): 45, pid=123, name=python, Ch 00000008",
                "[ 8600.0] NVRM: Xid (PCI:0000:3b:00): 74, pid='<unknown>', name=<unknown>, NVLink: 0x0 0x0",
            ]
        )
    )
    assert {number: (line.role, line.because_of) for number, line in lines.items()} == {
        1: ("cause", None), 2: ("consequence", 1), 3: ("consequence", 1), 4: ("consequence", 1), 5: ("consequence", 1),
    }  # fmt: skip
    assert lines[1].may_exclude_node
    assert not lines[4].may_exclude_node


def test_an_application_fault_and_its_cleanup_exclude_nothing() -> None:
    lines = by_line(
        "[10.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=python, Ch 00000008, MMU Fault\n"
        "[10.1] NVRM: Xid (PCI:0000:3b:00): 43, pid=9, name=python, Ch 00000008\n"
        "[10.2] NVRM: Xid (PCI:0000:3b:00): 45, pid=9, name=python, Ch 00000009\n"
    )
    assert [(line.role, line.because_of) for line in lines.values()] == [
        ("cause", None),
        ("consequence", 1),
        ("consequence", 1),
    ]
    assert not any(line.may_exclude_node for line in lines.values())


def test_a_cleanup_hours_later_has_another_cause() -> None:
    lines = by_line(
        "[10.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=python, Ch 00000008, MMU Fault\n"
        "[90000.2] NVRM: Xid (PCI:0000:3b:00): 45, pid=9, name=python, Ch 00000009\n"
    )
    assert (lines[2].role, lines[2].because_of) == ("consequence", None)


NFS = "nfs: server nas01 not responding, still trying"
STUCK = "INFO: task python:4242 blocked for more than 120 seconds."


@pytest.mark.parametrize("server_first", [True, False])
def test_a_task_stuck_in_a_silent_filesystem_follows_from_it(server_first: bool) -> None:
    trace = "[200.1]  rpc_wait_bit_killable+0x24/0xb0 [sunrpc]"
    text = f"[190.0] {NFS}\n[200.0] {STUCK}\n{trace}" if server_first else f"[200.0] {STUCK}\n{trace}\n[260.0] {NFS}"
    lines = {line.class_name: line for line in judged(text)}
    assert lines["hung_task"].because_of == lines["nfs_server_silent"].number
    assert lines["hung_task"].waits_for == "nfs"
    assert lines["nfs_server_silent"].role == "cause"
    assert not any(line.may_exclude_node for line in lines.values())


def test_a_task_stuck_elsewhere_does_not_follow_from_a_silent_filesystem() -> None:
    lines = by_line(f"[190.0] {NFS}\n[200.0] {STUCK}\n[200.1]  os_acquire_rwlock_write+0x1/0x2 [nvidia]")
    assert (lines[2].waits_for, lines[2].because_of) == ("nvidia", None)


def test_nodes_of_one_file_do_not_explain_each_other() -> None:
    lines = by_line(f"n1: [10.0] {BUS}\nn2: [10.1] NVRM: Xid (PCI:0000:c1:00): 45, pid=9, name=python, Ch 1")
    assert (lines[2].node, lines[2].because_of) == ("n2", None)


def test_the_newest_first_is_read_the_other_way_round() -> None:
    lines = by_line(f"[11.0] NVRM: Xid (PCI:0000:c1:00): 45, pid=9, name=python, Ch 1\n[10.0] {BUS}")
    assert (lines[1].because_of, lines[2].role) == (2, "cause")


def test_scan_kernel_reports_a_recovered_device_as_over() -> None:
    lines = by_line(f"[1.0] {NFS}\n[99.0] nfs: server nas02 OK\n[100.0] nfs: server nas01 OK")
    assert lines[1].over_at == 3


def test_a_server_lost_with_the_nodes_own_link_follows_from_the_link() -> None:
    lines = by_line(
        "[5.0] mlx5_core 0000:17:00.0: device's health compromised - reached miss count\n"
        "[60.0] Lustre: work-OST0001-osc-ffff: Connection to work-OST0001 (at 10.0.0.9@o2ib) was lost; "
        "in progress operations using this service will wait\n"
    )
    assert lines[1].may_exclude_node
    assert (lines[2].role, lines[2].because_of, lines[2].may_exclude_node) == ("consequence", 1, False)


def test_a_disk_of_the_nodes_own_that_fails_may_exclude_it() -> None:
    lines = by_line(
        "[5.0] nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10\n"
        "[6.0] I/O error, dev nvme0n1, sector 1234 op 0x1:(WRITE) flags 0x0\n"
        "[6.1] XFS (nvme0n1p2): log I/O error -5\n"
        "[6.2] EXT4-fs error (device dm-3): ext4_find_entry:1455: inode #2: comm x: reading directory lblock 0\n"
    )
    assert [line.may_exclude_node for line in lines.values()] == [True, True, True, False]
    assert [line.because_of for line in lines.values()] == [None, 1, 1, None]


@pytest.mark.parametrize(
    "text",
    [
        "[5.0] nvme nvme4: starting error recovery\n[6.0] I/O error, dev nvme4n1, sector 12 op 0x0:(READ)",
        "[5.0] connection1:0: detected conn error (1022)\n[6.0] I/O error, dev sdc, sector 12 op 0x0:(READ)",
        "[1.0] sd 6:0:0:0: [sdb] Attached SCSI removable disk\n[6.0] I/O error, dev sdb, sector 12 op 0x0:(READ)",
        "[6.0] I/O error, dev sdf, sector 12 op 0x0:(READ)\n[7.0] usb 1-4: USB disconnect, device number 9",
        "[1.0] scsi host15: qla2xxx\n[6.0] I/O error, dev sdb, sector 12 op 0x0:(READ)",
        "[5.0] nvme nvme0: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10",
        "[5.0] XFS (nvme0n1p1): User initiated shutdown received. Shutting down filesystem",
        "[5.0] sd 0:0:1:0: [sdb] tag#0 FAILED Result: hostbyte=DID_BAD_TARGET driverbyte=DRIVER_OK cmd_age=0s",
        "[5.0] block nvme2n1: no available path - failing I/O\n[6.0] Buffer I/O error on dev nvme2n1, "
        "logical block 0, async page read",
        "[6.0] print_req_error: critical target error, dev sdx, sector 8",
        "[6.0] I/O error, dev vdb, sector 12 op 0x0:(READ)",
        "[6.0] I/O error, dev loop3, sector 12 op 0x0:(READ)",
        "[6.0] EXT4-fs (sda1): Delayed block allocation failed for inode 12 at logical offset 0 with max "
        "blocks 2 with error 28",
        "[6.0] EXT4-fs warning (device sda1): ext4_dx_add_entry:2461: Directory (ino: 1) index full, "
        "reach max htree level :2",
    ],
)  # fmt: skip
def test_a_disk_that_may_be_somewhere_else_or_only_full_excludes_nothing(text: str) -> None:
    assert judged(text)
    assert not any(line.may_exclude_node for line in judged(text))


def test_a_device_that_recovered_excludes_nothing() -> None:
    fatal = "[5.0] pcieport 0000:80:01.0: AER: Uncorrected (Fatal) error message received from 0000:81:00.0"
    assert by_line(fatal)[1].may_exclude_node
    assert not by_line(f"{fatal}\n[5.3] mlx5_core 0000:81:00.0: AER: device recovery successful")[1].may_exclude_node


@pytest.mark.parametrize(
    "name",
    sorted(
        {name for rule in RULES for name in (*rule.effects, *rule.causes)}
        | set(ENDS)
        | {name for names in ENDS.values() for name in names}
    ),
)
def test_each_name_of_a_rule_is_a_class_that_exists(name: str) -> None:
    known = {row.name for row in SIGNATURES} | {f"xid_{number}" for number in XIDS}
    assert any(each.startswith(name[:-1]) if name.endswith("*") else each == name for each in known)


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("8593.5", 8593.5), ("Sep 19 02:29:46", 969330586.0), ("Sep19 02:29", 969330540.0), ("Thu Sep 19 02:29:46 2024", 1726712986.0),
        ("2024-09-19T11:29:46,5+09:00", 1726712986.5), ("1726712986123456", 1726712986.123456), ("+0.00012", None), ("木  9月 19 02:29:46 2024", None), ("", None), (None, None),
        ("Sep 39 99:29:46", None), ("Sep 19 2024 02:29:46", 1726712986.0), ("do sep 19 02:29:46 2024", 1726712986.0),
        ("1970-01-01T00:00:10", 10.0), ("Thu Jan  1 00:00:10 1970", 10.0), ("02:29:46", None),
    ],
)  # fmt: skip
def test_a_time_is_seconds_or_nothing(stamp: str | None, seconds: float | None) -> None:
    assert parse_time(stamp) == seconds


def test_the_json_has_the_keys_that_scripts_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dmesg.gz"
    file.write_bytes(gzip.compress(f"healthy\n[ 1.0] {BUS}\n".encode()))
    assert scan_kernel([str(file)], as_json=True) == 1
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert {key: line[key] for key in ("line", "class", "severity", "may_exclude_node")} == {
        "line": 2, "class": "gpu_off_the_bus", "severity": "critical", "may_exclude_node": True,
    }  # fmt: skip
    assert set(line["resource"]) == {"gpu", "pci", "mount", "server", "pid", "device"}
    assert line["resource"]["pci"] == "0000:c1:00.0"


def test_a_person_reads_one_sentence_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dmesg"
    file.write_text(f"[ 1.0] {BUS}\n[ 2.0] NVRM: Xid (PCI:0000:c1:00): 45, pid=9, name=python, Ch 1\n")
    assert scan_kernel([str(file)], as_json=False) == 1
    out = capsys.readouterr().out.splitlines()
    assert "fallen off the bus" in out[0]
    assert "the node may be broken" in out[0]
    assert "follows line 1" in out[3]


def test_a_healthy_file_is_fine_and_a_missing_one_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dmesg"
    file.write_text("[    0.000000] Linux version 6.1.0\n[    1.0] nvidia: loading out-of-tree module taints kernel.\n")
    assert scan_kernel([str(file)], as_json=False) == 0
    assert "no fault" in capsys.readouterr().out
    assert scan_kernel([str(file), str(tmp_path / "none")], as_json=True) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_broken_gzip_is_said_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dmesg.gz"
    file.write_bytes(gzip.compress(b"x" * 10000)[:-12] + b"garbage")
    assert scan_kernel([str(file)], as_json=False) == 2
    assert "cut short or damaged" in capsys.readouterr().err


def test_garbage_is_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)
    file = tmp_path / "noise"
    file.write_bytes(
        rng.randbytes(300_000) + b"\n" + b"[" * 200_000 + b"\n{" + b'{"MESSAGE":' * 3000 + b"\n" + b"> " * 50_000
    )
    assert scan_kernel([str(file)], as_json=True) in (0, 1)
    assert kernel_text_of("{" * 60_000) is None


def test_the_sentence_tells_the_gravest_thing_and_not_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dmesg"
    file.write_text(
        "[ 1.0] sshd[304]: segfault at 0 ip 0000000000000000 sp 00007ffe8ceaabb8 error 14 in sshd[55d80c773000+d0000]\n"
        f"[ 200.0] {STUCK}\n[ 200.1]  cxiWaitEventWait+0x1ab/0x2b0 [mmfslinux]\n"
    )
    assert scan_kernel([str(file)], as_json=False) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert "hung_task of python 4242, waiting for gpfs" in first
    assert "nothing in it alone excludes a node" in first


def test_an_explained_incident_shows_advice_as_advice(capsys: pytest.CaptureFixture[str]) -> None:
    from slurm_watchdog.cli.show import print_incident
    from slurm_watchdog.model.documents import Explanation, Incident

    incident = Incident(id="i1", kind="gpu_fault", state="firing", summary="GPU 3 of n1", evidence=(BUS,))
    print_incident(Explanation(incident=incident), 0.0)
    out = capsys.readouterr().out
    assert "advice, not what was found" in out
    assert "Try: " in out


PLAIN = st.sampled_from(
    [
        "usb 1-1: new high-speed USB device number 7 using xhci_hcd",
        "IPv6: ADDRCONF(NETDEV_CHANGE): veth1: link becomes ready",
        "Call Trace:",
        " rpc_wait_bit_killable+0x24/0xb0 [sunrpc]",
        " __schedule+0x24e/0x590",
        "scsi host3: iSCSI Initiator over TCP/IP",
        "INFO: task python3:4411 blocked for more than 120 seconds.",
        "nfs: server 10.0.0.5 not responding, still trying",
        "nfs: server 10.0.0.5 OK",
        "NVRM: Xid (PCI:0000:86:00): 31, pid=1, name=python3, Ch 00000008",
        "",
    ]
)
PREFIXES = st.sampled_from(
    [
        "[{:12.6f}] {}",
        "\x1b[32m[{:12.6f}] \x1b[0m{}",
        "Feb 11 10:00:00 n1 kernel: [{:12.6f}] {}",
        "Feb 11 10:00:00 n2 app[12]: {:f} {}",
        "<3>[{:12.6f}] {}",
    ]
)


@given(st.lists(st.tuples(PREFIXES, PLAIN), max_size=60), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_a_file_read_in_blocks_says_what_it_says_line_by_line(rows: list[tuple[str, str]], size: int) -> None:
    lines = [form.format(number, text) for number, (form, text) in enumerate(rows)]
    scan, found, number = KernelScan(), [], 1
    for start in range(0, len(lines), size):
        block = "".join(f"{line}\n" for line in lines[start : start + size]).encode()
        found += list(scan.messages(block, number))
        number += len(lines[start : start + size])
    whole = list(read_messages(lines))
    assert judge_file(found).lines == judge_file(whole).lines
    assert (scan.lines, scan.speaks) == (len(lines), bool(whole))


def test_a_storm_is_read_to_its_end() -> None:
    xid = "[{:.1f}] NVRM: Xid (PCI:0000:86:00): 31, pid={}, name=python3, Ch 00000008\n"
    scan = KernelScan()
    block = "".join(xid.format(n, n) for n in range(30_000)).encode()
    numbers = [message.number for message in scan.messages(block, 1)]
    assert len(numbers) == 30_000
    assert numbers[-1] == 30_000


PARTED = """{stamp}NVRM: The NVIDIA GPU 0000:18:00.0
{stamp}NVRM: (PCI ID: 10de:2330) installed in this system has
{stamp}NVRM: fallen off the bus and is not responding to commands.
"""


def test_a_sentence_of_several_lines_has_the_address_of_its_first_and_another_nodes_has_not() -> None:
    def found(text: str) -> list[str | None]:
        messages = KernelScan().messages(text.encode(), 1)
        return [m.fact.pci_bus_id for m in messages if m.fact is not None and m.fact.name == "gpu_off_the_bus"]

    assert found(PARTED.format(stamp="[ 8593.497005] ")) == ["0000:18:00.0"]
    first, *rest = PARTED.format(stamp="Sep 19 02:29:46 n1 kernel: ").splitlines(keepends=True)
    elsewhere = "".join(line.replace(" n1 ", " n2 ") for line in rest)
    assert found(first + elsewhere) == [None]
    assert found(first + "[ 9.0] usb 1-1: new device\n" * 9 + "".join(rest)) == [None]
