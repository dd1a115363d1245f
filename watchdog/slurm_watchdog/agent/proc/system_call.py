"""One thread in a system call: what the kernel's lines about it say, and whether it may wait for a filesystem."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from slurm_watchdog.agent.proc.entry import parse_stat
from slurm_watchdog.base.mounts import strip_deleted
from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.syscalls import (
    COUNTED,
    FAULT_WCHAN,
    FAULTS_IN,
    FD_ARGUMENT,
    HARMLESS_WCHAN,
    NOT_A_FILESYSTEM_WAIT,
    NOT_STORAGE,
    PAGE_FAULT,
    PATH_ARGUMENT,
    idle_numbers,
    name_of,
)
from slurm_watchdog.model.observations import Blocked, CallTarget


@dataclass(frozen=True)
class SystemCall:
    """One line of /proc/PID/syscall. `number` -1: blocked outside of a system call, in a page fault."""

    number: int
    args: tuple[int, ...]


class SeenCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one look at a thread shows, which may wait for a filesystem."""

    line: str  # Of /proc/PID/task/TID/syscall.
    state: str
    wchan: str | None = None
    syscall: str | None = None  # Its name, or PAGE_FAULT.
    path: str | None = None  # The open file that it is about.
    cpu_ticks: int = 0
    switches: int = -1
    calls: int | None = None  # How many reads and writes have come back, where it is one of those.


@dataclass
class BlockedCallHistory:
    """A thread in one call since `first_at`."""

    seen: SeenCall  # The newest look.
    first_at: float
    seen_at: float
    first_ticks: int = 0  # CPU time at the first look.
    sightings: int = 1
    held_at: float = 0.0  # When a child last hung on its process, so that no one could look.
    target: CallTarget | None = None  # As the child resolved it, in the process's own namespace.
    guess: CallTarget | None = None  # From the agent's own table of mounts, for as long as the child has not answered.

    @property
    def may_wait(self) -> bool:
        """Whether it may be held up by a filesystem, as far as its file is known by now."""
        return is_waiting_for_storage(self.seen, self.target)


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


def is_waiting_for_storage(seen: SeenCall, target: CallTarget | None = None) -> bool:
    """Whether a thread in this call, on this file, may be held up by a filesystem."""
    if seen.state == "D" or seen.syscall == PAGE_FAULT:
        return True
    if seen.syscall in NOT_A_FILESYSTEM_WAIT or any(word in (seen.wchan or "") for word in HARMLESS_WCHAN):
        return False
    if seen.syscall in FD_ARGUMENT:
        return is_storage(seen.path)
    # Its path is a string in the process's memory, read in a child: until then nothing is claimed.
    return seen.syscall in PATH_ARGUMENT and (target is None or is_storage(target.path))


_MACHINE = os.uname().machine


def see_call(
    read: Callable[[str], bytes], link: Callable[[int], str | None], is_main: bool, machine: str = _MACHINE
) -> SeenCall | None:
    """The call of one thread; None where it does not wait for a filesystem. `read` gives the content of a file in the
    thread's directory of /proc, `link` the name of an open file. Of other threads than the main one those in a call in
    which threads idle are not looked at any further. Raises OSError, ValueError, IndexError."""
    line = read("syscall")
    idle = line.split(b" ", 1)[0] in idle_numbers(machine)
    call = None if idle and not is_main else parse_syscall(line)
    if call is None:
        return None
    stat = parse_stat(read("stat"))
    name = name_of(call.number, machine) if call.number >= 0 else None
    if stat.state not in ("D", "S") or (idle and stat.state != "D"):
        return None
    concerns_a_file = name in FD_ARGUMENT or name in PATH_ARGUMENT
    if stat.state == "S" and call.number >= 0 and (not concerns_a_file or name in NOT_A_FILESYSTEM_WAIT):
        return None
    path = link(int32(call.args[FD_ARGUMENT[name]])) if name in FD_ARGUMENT else None
    if stat.state == "S" and name in FD_ARGUMENT and not is_storage(path):
        return None
    where = read("wchan").decode(errors="replace")
    wchan = where if where not in ("", "0") else None
    if _faults(call, name, path, stat.state, wchan):
        name, path = PAGE_FAULT, None
    elif stat.state == "S" and call.number < 0:
        return None
    calls = parse_finished_calls(read("io")) if name in COUNTED else None
    switches = parse_switches(read("status"))
    seen = SeenCall(line.decode("latin-1"), stat.state, wchan, name, path, stat.cpu_ticks, switches, calls)
    return seen if is_waiting_for_storage(seen) else None


def _faults(call: SystemCall, name: str | None, path: str | None, state: str, wchan: str | None) -> bool:
    """Whether a thread waits for a page of a mapped file: outside of any call, or in one that is about no file."""
    if not any(word in (wchan or "") for word in FAULT_WCHAN):
        return False
    return call.number < 0 or (state == "D" and name in FAULTS_IN and not is_storage(path))


def describe_blocked(thread: int, track: BlockedCallHistory) -> Blocked:
    """The value that a report carries."""
    target = track.target if track.target and track.target.mount else track.guess or track.target or CallTarget()
    path = target.path or track.seen.path
    return picked(
        Blocked,
        target,
        thread_id=thread,
        seconds=track.seen_at - track.first_at,
        state=track.seen.state,
        wchan=track.seen.wchan,
        syscall=track.seen.syscall,
        path=strip_deleted(path) if path else None,
    )
