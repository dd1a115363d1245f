"""What the layout of a whole text says about its lines: whose they are that stand under a heading, what
numbers only count. Pure.

Launchers and people put the output of several ranks into one text, each under a heading: Composer's `Begin
global rank 6 STDERR`, `tail` and `head` of several files (`==> logs/rank_3.err <==`), a line of dashes with a
rank in it. What stands there and says nothing of its own is that rank's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.grouping import named_by
from slurm_watchdog.diagnose.logs.line import NOBODY, Line, Who
from slurm_watchdog.diagnose.logs.ranks import DYING

_FENCE = r"[-=*#~+_]{3,}"
_FILE = late_regex(r"^==> (?P<path>.{1,300}) <==$")
_BEGIN = late_regex(
    rf"^{_FENCE} ?(?P<end>End )?(?:Begin )?(?:(?:of|for|output|log|logs|stdout|stderr) )*(?:global "
    rf")?rank[ =:_]?(?P<rank>\d{{1,6}})\b(?: \(?(?:STDOUT|STDERR|log|logs|output)\)?)?:? ?{_FENCE}$",
    re.IGNORECASE,
)


_FRAME = late_regex(r'\s*File "[^"]+", line \d+')
_MODULE = late_regex(r"\[\w[\w./-]*\.py:\d{1,5}\]")
FEW_LINES = 20
SMALL = 100
"""A task's number is below it, or comes again: of few lines a rising number above is that of a line (`grep
-n`, `less -N`)."""


LEAST_OF_A_LIST = 3  # 1, 2, 3: someone counts; a task 0 would be there, too.


def without_line_numbers(lines: Sequence[Line]) -> list[Line]:
    """The lines without the numbers in front, if these only count lines: they rise with each, and never come again.

    `srun --label` puts the same number before each line of a task, and its tasks begin with 0.
    """
    numbers = [line.who.number for line in lines if line.who.number is not None and line.who.host is None]
    if not numbers or numbers[0] == 0 or any(one >= other for one, other in pairwise(numbers)):
        return list(lines)
    is_list = numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= LEAST_OF_A_LIST
    if len(numbers) < FEW_LINES and numbers[-1] < SMALL and not is_list:
        return list(lines)
    return [
        replace(line, who=replace(line.who, number=None))
        if line.who.number is not None and line.who.host is None
        else line
        for line in lines
    ]


def without_modules(lines: Sequence[Line]) -> list[Line]:
    """The lines without a host and its number in brackets, if there is but one such host and its numbers are
    large, or other lines have a file there: loggers put a module and its line there (`[gpt2:120]`), and of a
    job's ranks some have small numbers."""
    bracketed = [line for line in lines if line.who.host is not None and line.who.number is not None]
    if any(DYING.match(line.text) or _FRAME.match(line.text) for line in bracketed):
        return list(lines)  # mpirun's, with a process's number; a logger has no prefix within a traceback
    speakers = [line.who for line in bracketed]
    if not speakers or len({who.host for who in speakers}) > 1:
        return list(lines)
    if min(who.number or 0 for who in speakers) < SMALL and not any(_MODULE.match(line.raw) for line in lines):
        return list(lines)
    named = speakers[0].host
    return [
        replace(line, who=replace(line.who, host=None, number=None))
        if line.who.host == named and line.who.number is not None
        else line
        for line in lines
    ]


def with_sections(lines: Sequence[Line]) -> tuple[list[Line], list[int]]:
    """(the lines, in their order; the numbers of the lines that are headings). Those under a heading that
    names a rank have it where they name no one themselves."""
    filled: list[Line] = []
    headings: list[int] = []
    current: Who = NOBODY
    for line in lines:
        text = line.raw.strip()
        heading = _heading(text) if text[:3] in _STARTS else None
        if heading is not None:
            current = heading
            headings.append(line.number)
        elif current.named and not line.who.named:
            line = replace(line, who=current)
        filled.append(line)
    return filled, headings


_STARTS = frozenset({"==>", *(sign * 3 for sign in "-=*#~+_")})


def _heading(text: str) -> Who | None:
    """Whose lines follow, NOBODY where a part ends; None if it is no heading."""
    file = _FILE.match(text)
    if file is not None:
        named = named_by(file["path"])
        return Who(rank=named.rank, local=named.local, host=named.host)
    part = _BEGIN.match(text)
    if part is None:
        return None
    return NOBODY if part["end"] else Who(rank=int(part["rank"]))
