"""How kernels and drivers write that something is wrong: the rows of `data/kernel_signatures.conf`; the first
that matches is taken.

`heads` are the first three characters of every line that the row can match; a row without heads is for lines
that may begin with anything, such as a program's name. One of the `needles` is in every such line, in lower case. Head
and needles are what most lines cost. `regex` is matched from the beginning of the message, so that a program's
name or a file's name inside a line can't play another line. Its groups are the fields of
slurm_watchdog.parse.kernel_log.line.KernelFact. The words of the rows are from the sources: Linux 4.18 to
6.18, NVIDIA's open-gpu-kernel-modules 470 to 590, amdgpu, Lustre 2.10 to 2.15, libceph and ceph, mlx5 and its
peers, and for drivers without public source (GPFS, WekaFS, BeeGFS) what their users published.

Lines of the kernel may begin with, or hold, what a program calls itself: its name (at most 15 characters, TASK_COMM_LEN),
its file's (255), its arguments. A program may be called `NVRM: ` and a file `fallen off the bus`; when it crashes, the
kernel writes a true record of its own that reads like a driver's. So such a line is known by its form (USER_TEXT) before
any row is tried, and gives only the rows that are about programs. Lines of each form: tests/captures/kernel/user_text.yaml.
Sources: arch/*/mm/fault.c, arch/x86/kernel/traps.c, kernel/signal.c, fs/exec.c, mm/oom_kill.c, mm/page_alloc.c,
kernel/exit.c, fs/drop_caches.c, block/blk-core.c, mm/mmap.c, kernel/capability.c, security/yama, kernel/audit.c,
fs/coredump.c, fs/fs_parser.c, fs/super.c, fs/overlayfs, fs/fuse, net/9p, net/ceph, drivers/net/bonding, mm/vmalloc.c,
mm/memfd.c of Linux 4.18 to 6.18.
"""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import Fields, read_shipped
from slurm_watchdog.model.observations import FaultSeverity

PARTS = ("none", "memory", "cpu", "pcie", "nic", "disk", "filesystem", "heat", "gpu", "link")
"""Parts of a machine that a line may be about; `none`: a program, a server, the kernel itself."""
AS_WARNING = 4
AS_INFORMATION = 6  # The kernel's level of dev_info and pci_info.


class Signature(msgspec.Struct, frozen=True):
    """One way to write one thing."""

    name: str
    heads: tuple[str, ...]
    needles: tuple[str, ...]  # One of them is in every such line, in lower case.
    regex: re.Pattern[str]
    severity: FaultSeverity
    may_exclude_node: bool = False
    consequence: bool = False  # It follows from something else, which is to be looked for before it.
    highest_level: int = AS_WARNING
    """Of lines that may take a node away: the kernel's level (4: warning). Crashing programs' is information (6)."""
    part: str = "none"  # One of PARTS.


def kernel_row(fields: Fields) -> Signature:
    """The row of a section [kernel NAME]."""
    severity = FaultSeverity(fields.choice("severity", tuple(FaultSeverity)) or FaultSeverity.WARNING)
    heads, needles = fields.texts("begins"), fields.needles()
    return Signature(
        fields.name(),
        heads,
        needles,
        fields.expression(re.IGNORECASE),
        severity,
        fields.flag("excludes_node"),
        fields.flag("consequence"),
        AS_INFORMATION if fields.flag("as_information") else AS_WARNING,
        fields.choice("part", PARTS, required=False) or PARTS[0],
    )


SIGNATURES: tuple[Signature, ...] = read_shipped("kernel_signatures.conf", {"kernel": kernel_row})["kernel"]

"""The rows of the package."""


def kernel_rows() -> tuple[Signature, ...]:
    """The rows in force in this process: a site's, and then those of the package."""
    return site_rows.current().before("kernel", SIGNATURES, lambda row: row.name)


HARMLESS = late_regex(
    r"audit[:(]|type=\d+ audit|perf: interrupt took too long|\[Firmware (?:Bug|Warn|Info)\]|ACPI (?:BIOS )?(?:Error|Warning)|systemd\[1\]:"
    r"|device-mapper: core: CONFIG_|Command line:|Kernel command line:"
    r"|(?:blk_update_request: |print_req_error: )?(?:Buffer )?(?:I/O|critical \w+) error(?:,| on) dev(?:ice)? (?:fd|sr)\d+,",
    re.IGNORECASE,
)
"""Beginnings of lines that are about nothing which concerns a job, whatever words they contain: a drive for floppy disks
or CDs, that a virtual machine or a management controller has, fails whenever it is empty."""


class UserText(msgspec.Struct, frozen=True):
    """One form of line that holds a user's words."""

    name: str
    regex: re.Pattern[str]  # Matched from the beginning.
    rows: frozenset[str]  # Names of the signatures that such a line may give.


def _form(name: str, regex: str, rows: str) -> UserText:
    return UserText(name, re.compile(regex, re.IGNORECASE), frozenset(rows.split()))


_COMM = r".{0,16}?"

USER_TEXT: tuple[UserText, ...] = tuple(_form(*each) for each in (
    ("launched", r"process '", ""),
    ("ptrace", r"ptrace (?:attach|traceme) ", ""),
    ("capabilities", r"(?:capability: )?warning: `", ""),
    ("old calls", r"(?:mmap: |process `|x86/split lock detection: |TCP: request_sock_\w+: )", ""),
    ("registers", r"(?:CPU: \d+ (?:UID: \d+ )?PID: |Code: |Comm: |Modules linked in: |Hardware name: |RIP: )", ""),
    ("audit", r"audit[:(]|type=\d+ ", ""),
    ("coredump", r"(?:coredump: |Pid \d+\(|Core dump to )", "core_dump_failed"),
    ("killed", r"(?:Memory cgroup out of memory|Out of memory)[:( ]", "oom_kill oom_deadlock"),
    ("oom_kill", r"oom-kill:constraint=", "oom_kill"),
    ("oom tasks", r"\[\s*\d+\]\s+\d+\s+\d+\s", ""),
    ("crash", rf"(?:traps: )?{_COMM}\[\d+\]:? ", "segfault"),
    ("comm and pid", rf"{_COMM} \(\d+\)(?:: | used | uses | is )", ""),
    ("oom_invoked", rf"{_COMM} invoked oom-killer: ", "oom_invoked"),
    (
        "page allocation", rf"(?:warn_alloc: )?{_COMM}: page allocation (?:failure|stalls)",
        "page_allocation_failed",
    ),
    ("fatal signal", rf"{_COMM}: potentially unexpected fatal signal ", ""),
    ("beyond the end", rf"{_COMM}: attempt to access beyond end of device", "disk_error"),
    # fs/fs_parser.c, fs/super.c and the option parsers of filesystems: whoever has a user namespace may mount, with any words
    (
        "mount options",
        r"[\w.-]{1,20}(?: error| warning)?(?: \([^()]{0,40}\))?: (?:[\w: ]{0,40})?(?:unknown (?:parameter|mount option|option|subsys)|bad (?:value|option|mount option|or missing)|"
        r"unrecogni[sz]ed (?:mount )?option|(?:invalid|unsupported|unexpected|conflicting) (?:mount )?(?:option|value|argument)|failed to (?:resolve|parse|look ?up|open)|"
        r"no channels available|could not find|can't (?:find|open|look ?up)|special device|duplicate)",
        "",
    ),
    ("mount source", r".*: Can't (?:look ?up|open|mount)\b[\w ,]*$", ""),
    ("label", r"BTRFS(?: info)?: device (?:label|fsid) ", ""),
    # a bond, bridge or team in a network namespace has any name, and prints the values it is given
    ("interface option", r"\S{1,15}: option \w+: ", ""),
    ("vmalloc", rf"{_COMM}: vmalloc (?:error|size)", ""),
    ("memfd", r"memfd_create\(\)|\S+: memfd_create\(\)", ""),
    (
        "program",
        r"program \S+ is using|futex_wake_op: |sched: |netlink: |printk: |input: |hid-generic |usb \S+: (?:Product|Manufacturer|SerialNumber): ",
        "",
    ),
    ("promiscuous", r"(?:device )?\S{1,15}: (?:renamed from|entered promiscuous|left promiscuous)", ""),
))  # fmt: skip
"""Those that match a line say what it may give. That a driver's line names a program behind its own prefix
and device is no matter: no one writes that prefix."""
