"""How launchers write that a process ended: the rows of `data/launcher_exits.conf`, one a way, with whom it
names and how it ended.

Some need two or three lines for it (a table, a box, a sentence that is wrapped): each has its own row, and
what the lines of one table say together is put together by `together`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.entries import Fields
from slurm_watchdog.knowledge.shipped import read_shipped

KILLS = frozenset({4, 7, 8, 9, 11})
"""Signals that nobody dies of because his peers have ended: ILL, BUS, FPE, KILL, SEGV. (ABRT follows from a
lost connection, TERM and INT are the launcher's.)"""
CLASSES = {
    9: "killed",
    11: "segmentation_fault",
    7: "bus_error",
    4: "illegal_instruction",
    8: "floating_point_trap",
}
"""Signal -> row of slurm_watchdog.knowledge.log_signatures."""
SHELL = 128
"""A shell between adds it to the number of the signal."""


class Ending(Struct, frozen=True, kw_only=True):
    """What one line says of a process that ended; None: it does not say."""

    rank: int | None = None
    local: int | None = None
    pid: int | None = None
    host: str | None = None
    code: int | None = None
    """As Python writes it: below 0 the number of a signal."""

    @property
    def signal(self) -> int | None:
        return -self.code if self.code is not None and self.code < 0 else None

    @property
    def words(self) -> str:
        """`was killed (SIGKILL)`, `exited with code 1`; `ended` where the line does not say how."""
        if self.code is None:
            return "ended"
        if self.signal is None:
            return f"exited with code {self.code}"
        name = _signal_name(self.signal)
        return f"was killed ({name})" if self.signal == signal.SIGKILL else f"died of {name}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending_row(fields: Fields) -> re.Pattern[str]:
    """The expression of a section [ending NAME]."""
    return fields.expression("pattern", 0)


_ROWS: tuple[re.Pattern[str], ...] = read_shipped("launcher_exits.conf", {"ending": ending_row})["ending"]
_NEEDLES = ("exit", "signal", "rank", "terminated", "process name", "running at")


def ending_of(text: str) -> Ending | None:
    """What a line (without what stands before it) says of the end of a process; None if it is no launcher's
    word of one."""
    lower = text.lower()
    if not any(needle in lower for needle in _NEEDLES):
        return None
    match = next((found for row in _ROWS if (found := row.search(text)) is not None), None)
    if match is None:
        return None
    groups = match.groupdict()
    code = _number(groups.get("code"))
    if groups.get("signal"):
        code = -int(groups["signal"])
    elif groups.get("name"):
        code = -getattr(signal, groups["name"], 0) or None
    elif code is not None and code > SHELL and code - SHELL in KILLS:
        code = SHELL - code
    return Ending(
        rank=_number(groups.get("rank")),
        local=_number(groups.get("local")),
        pid=_number(groups.get("pid")),
        host=groups.get("host"),
        code=code,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None


def together(endings: Iterable[Ending]) -> list[Ending]:
    """What the lines say in their order, those of one table or box as one: who, and then how."""
    found: list[Ending] = []
    for each in endings:
        last = found[-1] if found else None
        names = each.rank is not None or each.local is not None or each.pid is not None
        if last is not None and not names and last.rank is None and last.local is None and last.pid is None:
            found[-1] = each if each.signal is not None or last.code is None else last
        elif last is not None and not names and last.code in (None, each.signal):
            # MPICH writes the signal's number as an exit code, and then says that it was one.
            found[-1] = replace(last, code=each.code)
        elif last is not None and last.pid is not None and each.pid == last.pid:
            found[-1] = replace(
                last,
                rank=last.rank if each.rank is None else each.rank,
                local=last.local if each.local is None else each.local,
                code=last.code if each.code is None else each.code,
            )
        else:
            found.append(each)
    return found
