"""Lines that stand under a heading which says whose they are. Pure.

Launchers and people put the output of several ranks into one text, each under a heading: Composer's `Begin global rank 6 STDERR`,
`tail` and `head` of several files (`==> logs/rank_3.err <==`), a line of dashes with a rank in it. What stands there and says nothing
of its own is that rank's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from watchdog.diagnose.log_files import named_by
from watchdog.diagnose.log_lines import NOBODY, Line, Who

_FENCE = r"[-=*#~+_]{3,}"
_FILE = re.compile(r"^==> (?P<path>.{1,300}) <==$")
_BEGIN = re.compile(
    rf"^{_FENCE} ?(?P<end>End )?(?:Begin )?(?:(?:of|for|output|log|logs|stdout|stderr) )*(?:global )?rank[ =:_]?(?P<rank>\d{{1,6}})\b(?: \(?(?:STDOUT|STDERR|log|logs|output)\)?)?:? ?{_FENCE}$",
    re.IGNORECASE,
)


def with_sections(lines: Sequence[Line]) -> list[Line]:
    """The lines, in their order; those under a heading that names a rank have it where they name nobody themselves."""
    filled: list[Line] = []
    current: Who = NOBODY
    for line in lines:
        text = line.raw.strip()
        heading = _heading(text) if text[:3] in _STARTS else None
        if heading is not None:
            current = heading
        elif current.named and not line.who.named:
            line = replace(line, who=current)
        filled.append(line)
    return filled


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
