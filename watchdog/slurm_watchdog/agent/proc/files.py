"""Reads small files of /proc."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from slurm_watchdog.agent.proc.entry import Stat, parse_stat
from slurm_watchdog.agent.proc.system_call import parse_syscall
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.knowledge.syscalls import name_of

BOOT_ID = "/proc/sys/kernel/random/boot_id"
MAX_LINKS = 4096  # Open files of one process that are looked at.


def read_file(path: str, where: int | None = None) -> bytes:
    """A small file of /proc, whole, without the cost of a file object; `path` may be relative to an open directory
    `where`, for walking a long path costs a tenth more. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=where)
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)


def read_words(path: str) -> str | None:
    """The text of such a file; None where it cannot be read, is empty, or says 0 as `wchan` does for nothing."""
    try:
        text = read_file(path).decode(errors="replace").strip("\0\n")
    except OSError:
        return None
    return text if text not in ("", "0") else None


def read_call_name(place: str) -> str | None:
    """The name of the system call that a process or thread (its directory in /proc) is in; None: in none, or unseen."""
    call = parse_syscall((read_words(f"{place}/syscall") or "").encode())
    return name_of(call.number, os.uname().machine) if call is not None and call.number >= 0 else None


def read_links(directory: str) -> tuple[int, list[str]]:
    """How many links a directory of /proc has (files that are open), and where those lead that could be read. Raises
    OSError."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as where:
        names, found = os.listdir(where)[:MAX_LINKS], []
        for name in names:
            with suppress(OSError):  # closed meanwhile
                found.append(os.readlink(name, dir_fd=where))
        return len(names), found


def read_stat(pid: int | str) -> Stat:
    """Of a process, or of the thread `PID/task/THREAD`. Raises OSError and ValueError."""
    return parse_stat(read_file(f"/proc/{pid}/stat"))


def parse_runnable_s(text: bytes) -> float:
    """Of /proc/PID/schedstat: on a CPU, and waiting for one (scheduler/sched-stats.rst). Raises ValueError."""
    on_cpu, ready = text.split()[:2]
    return (int(on_cpu) + int(ready)) / 1e9


def owner_of(pid: int | None) -> int:
    """The user whose process this is, by its directory in /proc, which takes no lock; -1 if it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def count_open_files(pid: int) -> int:
    """How many files a process has open, for next to nothing (since Linux 6.2); 0 where that is not said."""
    try:
        return os.stat(f"/proc/{pid}/fd").st_size
    except OSError:
        return 0


def is_the_kernels(path: str) -> bool:
    """Whether a file of /proc is the kernel's: container managers (lxcfs) put files of their own over some."""
    try:
        return os.stat(path).st_dev == os.stat("/proc").st_dev
    except OSError:
        return False


FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, linux/proc_ns.h


def is_in_first_pid_namespace() -> bool:
    """Whether the pids in the kernel's log are those of this /proc; False in a container with its own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def _reads_own_namespace() -> bool:
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


DEVICES = "/dev/nvidia"
"""What the name of a GPU's device begins with; its number follows. nvidiactl, nvidia-uvm and nvidia-caps are no GPU."""


def links_of(pid: int, thread: int) -> tuple[int, list[str]]:
    """How many files are open, and the names of those that could be read. Raises OSError."""
    return read_links(f"/proc/{pid}/task/{thread}/fd")


def other_thread(pid: int) -> int:
    """A thread of the process that is not its main one; the main one where there is no other. Raises OSError."""
    return next((int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid), pid)


def gpu_pattern(devices: str = DEVICES) -> re.Pattern[str]:
    """For the link of a GPU's device, its number in group 1; the file may have been removed since."""
    return re.compile(re.escape(devices) + r"(\d+)(?: \(deleted\))?")
