"""How launchers write that a process ended: the rows of `data/launcher_exits.conf`, one a way, with whom it
names and how it ended.

Some need two or three lines for it (a table, a box, a sentence that is wrapped): each has its own row.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Final

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.entries import Fields, read_shipped

CLASSES: Final[Mapping[int, str]] = {
    signal.SIGABRT: "abort",
    signal.SIGBUS: "bus_error",
    signal.SIGFPE: "floating_point_trap",
    signal.SIGILL: "illegal_instruction",
    signal.SIGKILL: "killed",
    signal.SIGSEGV: "segmentation_fault",
    signal.SIGTERM: "terminated",
}
"""Signal -> row of slurm_watchdog.knowledge.log_signatures."""
SENT_IN_ORDER: Final[frozenset[int]] = frozenset(
    {
        signal.SIGALRM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1,
        signal.SIGUSR2,
    }
)  # fmt: skip
"""With which launchers, Slurm and people end a process, or which follows from a closed connection."""
FIRST_HAND: Final[frozenset[int]] = frozenset(signal.Signals) - SENT_IN_ORDER - {signal.SIGABRT}
"""Signals that no process dies of because its peers have ended. (Libraries abort when they lose a peer.)"""
SHELL = 128  # A shell, or a container's runtime, between adds it to the number of the signal.
BYTE = 256  # A launcher in Python that exits with the -9 of its child exits with 247.
_NAMED_BY_WORDS = {words: number for number in signal.Signals if (words := signal.strsignal(number))}
"""`Aborted`, `Bus error`, `Killed`: as shells, Slurm and MPI write a signal."""


def code_of(number: int) -> int:
    """An exit code as Python writes it, below 0 the number of a signal, from how a shell or launcher passes it on."""
    if SHELL < number <= SHELL + signal.SIGSYS:
        return SHELL - number
    return number - BYTE if BYTE - number in CLASSES else number


def code_in_words(text: str) -> int | None:
    """The exit code that words such as `Aborted (core dumped)` and `Exited with exit code 137` mean; None: none."""
    found = _CODE.search(text)
    if found is not None:
        return code_of(int(found["code"]))
    number = next((number for words, number in _NAMED_BY_WORDS.items() if text.startswith(words)), None)
    return -number if number is not None else -signal.SIGKILL if text.startswith("Out Of Memory") else None


_CODE = late_regex(r"\b[Ee]xit(?:ed with exit)? code (?P<code>\d{1,3})\b")


class Ending(msgspec.Struct):
    """A process that ended, as a launcher, a shell or Slurm says it in a line, a box or a table; None: not said."""

    rank: int | None = None
    local: int | None = None
    pid: str | None = None
    host: str | None = None
    code: int | None = None  # As Python writes it: below 0 the number of a signal.
    each: bool = False  # It is written of each process that ended, in any order.
    line: int = 0
    end: int = 0  # Its last line: between, its traceback may stand.
    at: float | None = None
    root: bool = False  # Its launcher says that it was the first one that failed.
    alone: bool = False  # No launcher says who was the first one.
    what: str = ""  # Slurm's words, where it is Slurm that says so, `Exited with exit code 1`,
    task: int | None = None  # of this task, or of several:
    number: int = 1

    @property
    def signal(self) -> int | None:
        return -self.code if self.code is not None and self.code < 0 else None

    @property
    def named(self) -> bool:
        """Whether anything tells one process from another."""
        return self.rank is not None or self.local is not None or self.host is not None

    @property
    def out_of_memory(self) -> bool:
        return self.what.startswith("Out Of Memory")

    @property
    def row(self) -> str | None:
        """The row of the signatures that the way it ended stands for, if it was no ordinary exit."""
        return "oom_kill" if self.out_of_memory else CLASSES.get(self.signal) if self.signal is not None else None

    @property
    def name(self) -> str:
        """The same, and for an ordinary exit the row of whoever says so."""
        return self.row or ("task_exit" if self.what else "launcher")

    @property
    def first_hand(self) -> bool:
        """Whether it cannot have followed from the end of another process."""
        return self.signal in FIRST_HAND

    @property
    def explains(self) -> bool:
        """Whether how it ended is a cause by itself, and nothing that a lost peer brings about."""
        return self.first_hand or self.name == "abort"

    @property
    def words(self) -> str:
        """`was killed (SIGKILL)`, `exited with code 1`; `ended` where the line does not say how."""
        if self.out_of_memory:
            return "was killed: out of memory"
        if self.code is None:
            return "ended"
        if self.signal is None:
            return f"exited with code {self.code}"
        name = _signal_name(self.signal)
        if self.signal == signal.SIGKILL:
            return f"was killed ({name})"
        return f"was ended by {name}" if self.signal in SENT_IN_ORDER else f"died of {name}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class EndingRow(Struct, kw_only=False):
    """One way to write that a process ended."""

    regex: re.Pattern[str]
    each: bool = False  # It is written of each process that ended, in any order: the first one is not who failed first.


def ending_row(fields: Fields) -> EndingRow:
    """The row of a section [ending NAME]."""
    return EndingRow(fields.expression(0), fields.flag("each"))


_ROWS: tuple[EndingRow, ...] = read_shipped("launcher_exits.conf", {"ending": ending_row})["ending"]
_NEEDLES = ("exit", "signal", "rank", "terminated", "process name", "running at", "abort", "killed", ": line ")


def ending_of(text: str) -> Ending | None:
    """What a line (without its prefix) says of the end of a process; None if it is no launcher's word of one."""
    lower = text.lower()
    if not any(needle in lower for needle in _NEEDLES):
        return None
    row, match = next(((row, found) for row in _ROWS if (found := row.regex.search(text)) is not None), (None, None))
    if row is None or match is None:
        return None
    groups = match.groupdict()
    code = _number(groups.get("code"))
    if groups.get("signal"):
        code = -int(groups["signal"])
    elif groups.get("name"):
        code = -getattr(signal, groups["name"], 0) or None
    elif groups.get("words"):
        code = code_in_words(groups["words"])
    elif code is not None:
        code = code_of(code)
    return Ending(
        rank=_number(groups.get("rank")),
        local=_number(groups.get("local")),
        pid=groups.get("pid"),
        host=groups.get("host"),
        code=code,
        each=row.each,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None
