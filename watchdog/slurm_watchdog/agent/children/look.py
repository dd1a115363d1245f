"""What a child does instead of answering, by the kernel's word: only one that was seen to stand in one call about files
says anything about its resource. Stopped, ended or without CPU it says nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slurm_watchdog.agent.proc.files import read_file, read_stat, read_words
from slurm_watchdog.agent.proc.system_call import parse_switches, parse_syscall
from slurm_watchdog.knowledge.syscalls import FD_ARGUMENT, HARMLESS_WCHAN, NOT_A_FILESYSTEM_WAIT, PATH_ARGUMENT, name_of

APART_S = 1.0  # Between two looks, and before the first: who is asked a moment ago works.
STARVED_LOOKS = 3  # In a row, before a hung child counts as one without CPU: with a second between them.
RESTED_S = 5.0  # A hung child is left so long after its deadline before it counts as one without CPU.
STOPPED = "its child was stopped: no answer"
STARVED = "its child got no CPU, or did not stop computing: no answer"
ENDED = "its child was ended: no answer"
_OF_FILES = (FD_ARGUMENT.keys() | PATH_ARGUMENT.keys() | {"sync"}) - NOT_A_FILESYSTEM_WAIT
_MACHINE = os.uname().machine


@dataclass(frozen=True)
class Look:
    """One look at a child."""

    at: float
    state: str  # The letter of /proc/PID/stat; empty: it is gone.
    cpu_ticks: int = 0
    call: str = ""  # The line of /proc/PID/syscall; empty where it cannot be read: of a child that became a user.
    wchan: str = ""  # Where it waits in the kernel, as everybody may see it who may look into it.
    switches: int = -1  # How often it went to sleep.


@dataclass
class Looks:
    """What was seen of a child during one request: in its present call first, and now."""

    first: Look | None = None
    last: Look | None = None
    at: float = 0.0
    running: int = 0  # In a row in which it was running: one alone is also that of a driver that polls.

    def take(self, pid: int, asked_at: float, now: float) -> None:
        """Looks at a child of ours that has been at work for a while."""
        if now - max(self.at, asked_at) >= APART_S:
            self.at = now
            self.add(look_at(pid, now))

    def add(self, look: Look) -> None:
        """Keeps one look; with another call than before it is the first."""
        self.running = self.running + 1 if look.state == "R" else 0
        first = self.first
        if first is None or (first.call, first.wchan) != (look.call, look.wchan) or first.state not in ("D", "S"):
            self.first = look
        self.last = look

    @property
    def hangs_in_call(self) -> bool:
        return self.first is not None and self.last is not None and hangs_in_call(self.first, self.last)

    def why_silent(self, pid: int, now: float) -> str | None:
        """Why a child that has passed its deadline says nothing about its resource; None where it may hang on it."""
        why = why_no_answer(look_at(pid, now))
        return None if why == STARVED and self.last is not None and not self.running else why

    def why_given_up(self, deadline: float, now: float) -> str | None:
        """Why a hung child, stopped meanwhile or computing again, is to be ended, for a fresh one; else None."""
        if self.last is None or self.last.at != now or (why := why_no_answer(self.last)) is None:
            return None
        if why == STARVED and (now - deadline < RESTED_S or self.running < STARVED_LOOKS):
            return None  # it may be about to answer, or polls in a call that does not return
        return why


def look_at(pid: int, now: float) -> Look:
    """At a child of ours, which has not been waited for and never calls execve: so this never blocks."""
    try:
        stat = read_stat(pid)
    except (OSError, ValueError):
        return Look(now, "")
    try:
        call = read_file(f"/proc/{pid}/syscall").decode("ascii", "replace")
        return Look(now, stat.state, stat.cpu_ticks, call)
    except OSError:
        pass
    try:
        switches = parse_switches(read_file(f"/proc/{pid}/status"))
    except OSError:
        switches = -1
    return Look(now, stat.state, stat.cpu_ticks, "", read_words(f"/proc/{pid}/wchan") or "", switches)


def why_no_answer(look: Look) -> str | None:
    """Why a child in this state says nothing about its resource; None where it may stand in a call."""
    if look.state in ("T", "t"):
        return STOPPED
    if look.state in ("", "Z", "X", "x"):
        return ENDED
    return STARVED if look.state == "R" else None


def hangs_in_call(first: Look, second: Look) -> bool:
    """Whether it has stood in one call about files from the first look to the second, without computing. Where the call
    cannot be read: in one sleep that is not one of those for a timer, a pipe or a lock."""
    if second.at - first.at < APART_S or second.cpu_ticks - first.cpu_ticks > 1:
        return False
    if first.state not in ("D", "S") or second.state not in ("D", "S"):
        return False
    if second.wchan:
        harmless = any(word in second.wchan for word in HARMLESS_WCHAN)
        return (first.wchan, first.switches) == (second.wchan, second.switches) and not harmless
    call = parse_syscall(second.call.encode())
    if call is None or call.number < 0 or first.call != second.call:
        return False
    return name_of(call.number, _MACHINE) in _OF_FILES
