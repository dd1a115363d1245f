"""What a child does that has not answered: only one that stands in a call that does not return says something
about its resource.

Stopped, killed, without CPU or in the middle of a page fault (out of memory) it says nothing: the user that it
runs as may have had a hand in that. So the kernel is asked, twice with a second in between, as it is
asked about the ranks (agent.proc.blocked_calls).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from slurm_watchdog.agent.proc.files import read_file, read_stat
from slurm_watchdog.agent.proc.system_call import parse_syscall
from slurm_watchdog.knowledge.syscalls import FD_ARGUMENT, NOT_A_FILESYSTEM_WAIT, PATH_ARGUMENT, name_of

APART_S = 1.0  # Between two looks, and before the first: who is asked a moment ago works.
_OF_FILES = (FD_ARGUMENT.keys() | PATH_ARGUMENT.keys() | {"sync"}) - NOT_A_FILESYSTEM_WAIT
_MACHINE = os.uname().machine

STOPPED = "its child was stopped: no answer"
STARVED = "its child got no CPU, or did not stop computing: no answer"
ENDED = "its child was ended: no answer"


@dataclass(frozen=True)
class Look:
    """One look at a child."""

    at: float
    state: str  # The letter of /proc/PID/stat; empty: it is gone.
    cpu_ticks: int = 0
    call: str = ""  # The line of /proc/PID/syscall; empty where it cannot be read.


def look_at(pid: int, start_ticks: int, now: float) -> Look:
    """State and CPU time, which everybody may read, and the call, which only some may. Never blocks (see
    process_table)."""
    try:
        stat = read_stat(pid)
    except (OSError, ValueError):
        return Look(now, "")
    if stat.start_ticks != start_ticks:
        return Look(now, "")
    try:
        call = read_file(f"/proc/{pid}/syscall").decode("ascii", "replace")
    except OSError:
        call = ""
    return Look(now, stat.state, stat.cpu_ticks, call)


def start_of(pid: int) -> int:
    """Its start in clock ticks after boot; -1 where it is gone."""
    try:
        return read_stat(pid).start_ticks
    except (OSError, ValueError):
        return -1


def why_no_answer(look: Look) -> str | None:
    """Why a child in this state says nothing about its resource; None where it may stand in a call."""
    if look.state in ("T", "t"):
        return STOPPED
    if look.state in ("", "Z", "X", "x"):
        return ENDED
    return STARVED if look.state == "R" else None


def hangs_in_call(first: Look, second: Look) -> bool:
    """Whether it has stood in one call about files from the first look to the second, without computing."""
    call = parse_syscall(second.call.encode())
    if call is None or call.number < 0 or first.call != second.call:
        return False
    if second.at - first.at < APART_S or second.cpu_ticks - first.cpu_ticks > 1:
        return False
    return first.state in "DS" and second.state in "DS" and name_of(call.number, _MACHINE) in _OF_FILES
