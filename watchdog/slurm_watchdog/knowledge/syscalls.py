"""System calls by number (`data/syscalls.conf`), and which of them concern a file: by its descriptor, or by a path in
memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from slurm_watchdog.knowledge.entries import Fields, read_shipped
from slurm_watchdog.knowledge.stack_frames import Place


def _calls_row(fields: Fields) -> tuple[str, dict[int, str]]:
    machine, _, first = fields.entry.name.partition("/")
    return machine, dict(enumerate(_names(fields), int(first)))


def _wait_row(fields: Fields) -> dict[str, Place]:
    return dict.fromkeys(_names(fields), Place[fields.entry.name])


def _names(fields: Fields) -> list[str]:
    return " ".join(fields.texts("names", required=True)).split()


def _set_row(fields: Fields) -> tuple[str, list[str]]:
    return fields.entry.name, _names(fields)


_ROWS = read_shipped("syscalls.conf", {"calls": _calls_row, "wait": _wait_row, "set": _set_row})
X86_64, AARCH64 = (
    {number: name for machine, names in _ROWS["calls"] if machine == wanted for number, name in names.items()}
    for wanted in ("x86_64", "aarch64")
)
TABLES: Mapping[str, Mapping[int, str]] = {"x86_64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}
PLACES_OF_CALLS: Final[Mapping[str, Place]] = {name: place for row in _ROWS["wait"] for name, place in row.items()}
"""Name of a system call -> what a thread waits for in it."""


_SETS = dict(_ROWS["set"])
FD_ARGUMENT: dict[str, int] = dict.fromkeys(_SETS["fd"], 0) | {"sendfile": 1, "mmap": 4}
"""Name to the place of the descriptor among the arguments."""
PATH_ARGUMENT: dict[str, tuple[int | None, int]] = {
    **dict.fromkeys(_SETS["path"], (None, 0)),
    **dict.fromkeys(_SETS["at"], (0, 1)),
}
"""Name to the places of (directory descriptor or None, pointer to the path)."""
COUNTED, IDLE_CALLS = frozenset(_SETS["counted"]), frozenset(_SETS["idle"])

# Waiting for another process's lock is no fault of the filesystem; ioctl mostly talks to devices.
NOT_A_FILESYSTEM_WAIT = frozenset({"flock", "fcntl", "ioctl"})

# Wait channels (parts of their names) that mean waiting for a peer, a lock, a timer or a child, not for storage.
HARMLESS_WCHAN = (
    "pipe", "fifo", "wait_for_partner", "futex", "flock", "posix_lock", "locks_", "fcntl_setlk", "ep_poll", "poll_schedule",
    "do_sys_poll", "do_select", "hrtimer", "do_wait", "sigsuspend", "inotify", "eventfd", "tty", "n_tty", "unix_stream",
    "sk_wait", "inet_csk", "wait_woken",
)  # fmt: skip

PAGE_FAULT = "page fault"
"""In place of a system call's name: a thread that touched memory which is mapped from a file, and waits for
its contents. The kernel gives number -1 for it; no argument, no descriptor names the file."""

FAULT_WCHAN = (
    "folio_wait", "folio_lock", "wait_on_page", "lock_page", "filemap_", "io_schedule", "request_wait_answer", "fuse_", "nfs", "rpc_", "cl_sync_io_wait",
    "cl_page", "cl_lock", "osc_", "ll_", "ldlm", "ptlrpc", "ceph", "netfs", "cifs", "smb", "gpfs", "kxPoll", "cxiWait", "wekafs", "beegfs", "FhgfsOps", "9p_",
)  # fmt: skip
"""Wait channels (beginnings of their names, or parts) of a page fault on a file: the kernel's page cache, and
clients of filesystems. FUSE waits in S (`request_wait_answer`, Linux 6.18), or in D for a page that another
thread reads (`folio_wait_bit_common`)."""

FAULTS_IN = IDLE_CALLS | COUNTED | {"sendto", "sendmsg", "sendmmsg", "recvmmsg", "connect"}
"""Calls that may fault while they copy to or from the process's memory, although they are about no file."""

# A descriptor below one of these is no file on a filesystem that can stall (memory, devices, kernel tables).
NOT_STORAGE = ("/dev/", "/proc/", "/sys/", "/memfd:")


@cache
def idle_numbers(machine: str) -> frozenset[bytes]:
    """The numbers of IDLE_CALLS, in decimal, on `machine` (as uname -m says)."""
    return frozenset(b"%d" % number for number, name in TABLES.get(machine, {}).items() if name in IDLE_CALLS)


def name_of(number: int, machine: str) -> str:
    """The name of system call `number` on `machine` (as uname -m says), or the number in decimal."""
    return TABLES.get(machine, {}).get(number, str(number))


LOCAL_TYPES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "vfat", "tmpfs", "overlay"})
"""Filesystems that one kernel has for itself, as mountinfo names them: no one else can lose them, or answer for them."""
