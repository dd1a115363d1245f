"""Lines of the kernel that begin with, or hold, what a program calls itself: its name, its file's, its arguments.

A program may be called `NVRM: ` and a file `fallen off the bus`; when it crashes, the kernel writes a true
record of its own that reads like a driver's. So such a line is known by its form before any row of
slurm_watchdog.knowledge.kernel_signatures is tried, and gives only the rows that are about programs. A name
has at most 15 characters (TASK_COMM_LEN), a file's name 255, and both may hold any of them. Lines of each form are
in tests/captures/kernel/user_text.yaml.

Sources: arch/*/mm/fault.c, arch/x86/kernel/traps.c, kernel/signal.c, fs/exec.c, mm/oom_kill.c,
mm/page_alloc.c, kernel/exit.c, fs/drop_caches.c, block/blk-core.c, mm/mmap.c, kernel/capability.c,
security/yama, kernel/audit.c, fs/coredump.c, fs/fs_parser.c, fs/super.c, fs/overlayfs, fs/fuse, net/9p, net/ceph,
drivers/net/bonding, mm/vmalloc.c, mm/memfd.c of Linux 4.18 to 6.18.
"""

from __future__ import annotations

import re

import msgspec


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
