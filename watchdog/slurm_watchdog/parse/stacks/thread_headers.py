"""Headers of threads in dumps: py-spy's, faulthandler's, gdb's, eu-stack's, pystack's, those of people. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.model.evidence import ThreadStack

_SPY_THREAD = late_regex(r'\s*Thread (0x[0-9A-Fa-f]+|\d+)(?: \(([\w+ -]*)\))?(?:: "(.*?)"?)?\s*$')
_FAULT_THREAD = late_regex(
    r"\s*(?:Current thread|Thread) (0x[0-9A-Fa-f]+|\d+|[\w-]+)(?:,? ?[\[(](.*?)[\])])? \(most recent "
    r"call (first|last)\):?"
)
_PYSTACK_THREAD = late_regex(
    r"\s*Traceback for thread (\d+)(?: \((.*?)\))?(?: \[(.*?)\])? \(most recent call (first|last)\):?"
)
_GDB_THREAD = late_regex(r'\s*Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP|process) (\d+)\)?\)?(?: "(.*?)")?\)?:')
_EU_STACK_THREAD = late_regex(r"\s*TID (\d+):\s*$")
_LOOSE_THREAD = late_regex(
    r"""\s*(?:#\s*|-+\s*)?(?:Stack (?:of|for) )?(?:[Tt]hread)(?:ID| ID| name)?[:=]?\s*["']?([A-Za-z][\w-]*?)"""
    r"""["']?\s*\(?(?:ident|id|tid)?[=: ]*(\d+|0x[0-9a-f]+)?[^)]*\)?:?\s*-*$"""
)


class ThreadHeader(NamedTuple):
    """A thread whose frames follow."""

    thread_id: int  # 0 if unknown.
    name: str
    mode: str
    """How its frames are written: `spy`, `gdb`, `fault` and `first` (the innermost first), `last` (the outermost)."""
    active: bool = False
    owns_gil: bool = False
    may_share: bool = False
    """A main thread of py-spy: several headers one below the other may share the frames after them."""
    main_pid: int | None = None  # Of gdb's main thread, the pid of the process.

    def thread(self) -> ThreadStack:
        """The thread, still without frames."""
        name = self.name[:200] if "most recent" not in self.name else ""
        return ThreadStack(thread_id=self.thread_id, name=name, active=self.active, frames=(), owns_gil=self.owns_gil)


def may_be_thread_header(line: str) -> bool:
    """Whether one of the words is in the line without which it begins no thread: most lines end here."""
    return "hread" in line or "Traceback" in line or "(gdb)" in line or "#0 " in line or "[<" in line or "TID " in line


def parse_thread_header(line: str) -> ThreadHeader | None:
    """The thread that a line of a tool begins; None if it begins none."""
    if (match := _SPY_THREAD.match(line)) is not None:
        status, name = match[2] or "", match[3] or ""
        return ThreadHeader(_number(match[1]), name, "spy", "active" in status, "gil" in status, name == "MainThread")
    if (match := _PYSTACK_THREAD.match(line)) is not None:
        mode = "first" if match[4] == "first" else "last"
        return ThreadHeader(_number(match[1]), "", mode, owns_gil="Has the GIL" in line)
    if (match := _FAULT_THREAD.match(line)) is not None:
        named = match[2] or ("" if match[1][:1].isdigit() else match[1])
        return ThreadHeader(_number(match[1]), named, "fault" if match[3] == "first" else "last")
    if (match := _GDB_THREAD.match(line)) is not None:
        main = match[1] == "1"
        name = "MainThread" if main else (match[3] or f"Thread-{match[1]}")
        main_pid = int(match[2]) % 2**31 if main else None
        return ThreadHeader(_number(match[2]), name, "gdb", main_pid=main_pid)
    if (match := _EU_STACK_THREAD.match(line)) is not None:
        return ThreadHeader(_number(match[1]), "", "gdb")
    return None


def parse_loose_thread_header(line: str) -> ThreadHeader | None:
    """A header as people write it: `Thread: MainThread (id 12)`, `--- thread loader ---`."""
    match = _LOOSE_THREAD.match(line) if "Traceback" not in line else None
    return None if match is None else ThreadHeader(_number(match[2] or "0"), match[1], "last")


def _number(text: str) -> int:
    """A thread's number, decimal or hexadecimal, as far as 63 bits hold it; 0 for a name."""
    plain = re.fullmatch(r"0x[0-9A-Fa-f]+|[1-9]\d*|0", text)
    return int(text, 0) % 2**63 if plain else 0
