"""One thread in a system call: what the kernel's lines about it say, and whether it may wait for a filesystem."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_watchdog.base.mounts import strip_deleted
from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.syscalls import (
    FAULT_WCHAN,
    FAULTS_IN,
    FD_ARGUMENT,
    HARMLESS_WCHAN,
    NOT_A_FILESYSTEM_WAIT,
    NOT_STORAGE,
    PAGE_FAULT,
    PATH_ARGUMENT,
)
from slurm_watchdog.model.observations import Blocked, CallTarget


@dataclass(frozen=True)
class SystemCall:
    """One line of /proc/PID/syscall. `number` -1: blocked outside of a system call, in a page fault."""

    number: int
    args: tuple[int, ...]


@dataclass
class BlockedCallHistory:
    """A thread in one call since `first_at`."""

    line: bytes
    call: SystemCall
    state: str
    wchan: str | None
    syscall: str | None
    cpu_ticks: int
    switches: int
    calls: int | None
    first_at: float
    sightings: int = 1
    path: str | None = None
    target: CallTarget | None = None  # As the child resolved it, in the process's own namespace.
    guess: CallTarget | None = None  # From the agent's own table of mounts, for as long as the child has not answered.
    seen_at: float | None = None  # When it was looked at last.


def parse_syscall(text: bytes) -> SystemCall | None:
    """The call in /proc/PID/syscall; None for `running`, and for what is no such line."""
    words = text.split()
    if len(words) < 3:
        return None
    try:
        return SystemCall(int(words[0]), tuple(int(word, 16) for word in words[1:7]))
    except ValueError:
        return None


def parse_switches(text: bytes, kind: bytes = b"") -> int:
    """voluntary_ctxt_switches in /proc/PID/status, with the kind `non` nonvoluntary_…; -1 where it is missing."""
    return _value_after(text, b"\n%bvoluntary_ctxt_switches:" % kind)


def parse_finished_calls(text: bytes) -> int:
    """syscr + syscw in /proc/PID/io: how many reads and writes have come back."""
    return _value_after(b"\n" + text, b"\nsyscr:") + _value_after(b"\n" + text, b"\nsyscw:")


def parse_io_bytes(text: bytes) -> int:
    """rchar + wchar in /proc/PID/io: bytes through system calls."""
    return _value_after(b"\n" + text, b"\nrchar:") + _value_after(b"\n" + text, b"\nwchar:")


def _value_after(text: bytes, label: bytes) -> int:
    begin = text.find(label)
    return int(text[begin + len(label) :].split(None, 1)[0]) if begin >= 0 else -1


def int32(value: int) -> int:
    """The register holds a C int: its upper half means nothing (AT_FDCWD is -100)."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def is_storage(path: str | None) -> bool:
    """Whether a descriptor's name is a file or directory on some filesystem: no pipe, socket, device, kernel table."""
    return path is not None and path.startswith("/") and not path.startswith(NOT_STORAGE)


def is_waiting_for_storage(track: BlockedCallHistory) -> bool:
    """Whether a thread in this call, on this file, may be held up by a filesystem."""
    if track.state == "D" or track.syscall == PAGE_FAULT:
        return True
    if track.syscall in NOT_A_FILESYSTEM_WAIT or any(word in (track.wchan or "") for word in HARMLESS_WCHAN):
        return False
    if track.syscall in FD_ARGUMENT:
        return is_storage(track.path)
    # Its path is a string in the process's memory, read in a child: until then nothing is claimed.
    return track.syscall in PATH_ARGUMENT and (track.target is None or is_storage(track.target.path))


def faults(call: SystemCall, name: str | None, path: str | None, state: str, wchan: str | None) -> bool:
    """Whether a thread waits for a page of a mapped file: outside of any call, or in one that is about no file."""
    if not any(word in (wchan or "") for word in FAULT_WCHAN):
        return False
    return call.number < 0 or (state == "D" and name in FAULTS_IN and not is_storage(path))


def describe_blocked(thread: int, track: BlockedCallHistory, now: float) -> Blocked:
    """The value that a report carries."""
    target = track.target if track.target and track.target.mount else track.guess or track.target or CallTarget()
    path = target.path or track.path
    return picked(
        Blocked,
        target,
        thread_id=thread,
        seconds=(now if track.seen_at is None else track.seen_at) - track.first_at,
        state=track.state,
        wchan=track.wchan,
        syscall=track.syscall,
        path=strip_deleted(path) if path else None,
    )
