"""How launchers write that a process ended: one row a way, with whom it names and how it ended. The groups are the fields of Ending.

Some need two or three lines for it (a table, a box, a sentence that is wrapped): each has its own row, and what the lines
of one table say together is put together by `together`. Sources: torch/distributed/elastic/multiprocessing (errors/__init__.py, api.py),
torch/multiprocessing/spawn.py, DeepSpeed launcher/launch.py, Composer cli/launcher.py, Lightning fabric/strategies/launchers,
Open MPI orterun/help-orterun.txt and PRRTE's help-prun.txt, MPICH hydra (tools/bootstrap/utils, pmiserv_cb.c), Intel MPI, HPE PALS, Slurm's srun (step_launch_state).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct

KILLS = frozenset({4, 7, 8, 9, 11})
"""Signals that nobody dies of because his peers have ended: ILL, BUS, FPE, KILL, SEGV. (ABRT follows from a lost connection, TERM and
INT are the launcher's.)"""
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


_HOST = r"(?P<host>[A-Za-z0-9][\w.-]{0,250})"
_ROWS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(row)
    for row in (
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)",
        r"\bSignal (?P<signal>\d+) \(SIG[A-Z0-9]+\) received by PID (?P<pid>\d+)",
        rf"\bprocess rank (?P<rank>\d+) with PID (?P<pid>\d+) on node {_HOST} exited on(?: signal (?P<signal>\d+))?",
        r"^\s*Process name: \[\S{1,250},\s?(?P<rank>\d+)\]",
        r"^(?:=\s+|\s*)(?:Exit code|EXIT CODE|EXIT STATUS):\s+(?P<code>\d+)\s*$",
        rf"^=\s+(?:RANK (?P<rank>\d+) )?PID (?P<pid>\d+) RUNNING AT {_HOST}",
        r"^=\s+KILLED BY SIGNAL: (?P<signal>\d+)",
        r"EXIT STRING: .{0,80}?\(signal (?P<signal>\d+)\)",
        r"^\s*signal (?P<signal>\d{1,2}) \([A-Z][A-Za-z ]+\)\.$",
        rf"^(?:{_HOST}: )?rank (?P<rank>\d+) (?:died from signal (?P<signal>\d+)|exited with code (?P<code>\d+))",
        r"\b[Gg]lobal rank (?P<rank>\d+) \(PID (?P<pid>\d+)\) exited with code (?P<code>-?\d+)",
        r"\bRank (?P<rank>\d+) crashed with exit code (?P<code>-?\d+)",
        r"\[rank: ?(?P<rank>\d+)\] Child process with PID (?P<pid>\d+) terminated with code (?P<code>-?\d+)",
        r"\bContainer rank (?P<rank>\d+) status failed\b.{0,200} code (?P<code>-?\d+)",
        r"\bprocess (?P<local>\d+) terminated with (?:signal (?P<name>SIG[A-Z0-9]+)|exit code (?P<code>\d+))",
        r"died with <Signals\.SIG[A-Z0-9]+: (?P<signal>\d+)>",
        r"exits with return code = (?P<code>-?\d+)",
    )
)
_NEEDLES = ("exit", "signal", "rank", "terminated", "process name", "running at")


def ending_of(text: str) -> Ending | None:
    """What a line (without what stands before it) says of the end of a process; None if it is no launcher's word of one."""
    lower = text.lower()
    if not any(needle in lower for needle in _NEEDLES):
        return None
    match = next((found for row in _ROWS if (found := row.search(text)) is not None), None)
    if match is None:
        return None
    said = match.groupdict()
    code = _number(said.get("code"))
    if said.get("signal"):
        code = -int(said["signal"])
    elif said.get("name"):
        code = -getattr(signal, said["name"], 0) or None
    elif code is not None and code > SHELL and code - SHELL in KILLS:
        code = SHELL - code
    return Ending(
        rank=_number(said.get("rank")),
        local=_number(said.get("local")),
        pid=_number(said.get("pid")),
        host=said.get("host"),
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
        elif last is not None and not names and (last.code is None or _is_a_signal_too(last, each)):
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


def _is_a_signal_too(last: Ending, each: Ending) -> bool:
    """Whether MPICH wrote the signal's number as an exit code, and then says that it was one."""
    return each.signal is not None and last.code == each.signal
