"""How long a single text of a report may be. Pure.

A report has at most 8 MiB, and its rows are counted (slurm_watchdog.controller.state.report_bounds); that one
of them holds 4 MiB in a name would make every bound in rows worthless. Agents cut what they send far below
this, so what is cut here comes from a node that is not ours any more. Results are no part of it: their
evidence is bounded by the report, and kept within shares of a day.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from slurm_watchdog.model.report import Report

MAX_NAME: Final = 256
"""Characters of a name: of a process (15), node (64), user (32), job, GPU, phase, state."""
MAX_SENTENCE: Final = 1024
MAX_PATH: Final = 4096
"""linux/limits.h"""
MAX_LENGTHS: Final[dict[str, int]] = {
    **dict.fromkeys(("path", "directory", "mount", "source", "device", "server", "probe", "variables"), MAX_PATH),
    **dict.fromkeys(("line", "error", "problems", "reason"), MAX_SENTENCE),
}
"""Field -> the most characters of its text; of all others MAX_NAME. Agents send lines of 500 at most."""
UNCUT_FIELDS: Final = frozenset({"results"})
ELLIPSIS: Final = "…"


def may_have_long_text(data: bytes) -> bool:
    """Whether a text longer than the shortest limit may be in this JSON. May be wrong only in saying yes."""
    if len(data) <= MAX_NAME:
        return False
    # Without escaped backslashes every `\"` is within a text, and of what the other quotation marks divide
    # every second piece is one. What lies between two texts counts nothing: the numbers of eight ranks are
    # longer than any name, in each report.
    plain = data.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    return max(map(len, plain.split(b'"')[1::2]), default=0) > MAX_NAME


def cut_texts(report: Report) -> Report:
    """The report with no text longer than its field may be; what is cut ends in `…`. The same object where
    there is none."""
    return _cut(report, MAX_NAME)  # type: ignore[no-any-return]


def _cut(value: Any, limit: int) -> Any:
    match value:
        case str():
            return value if len(value) <= limit else value[: limit - 1] + ELLIPSIS
        case tuple():
            cut = tuple([_cut(each, limit) for each in value])
            return cut if any(new is not old for new, old in zip(cut, value, strict=True)) else value
        case msgspec.Struct():
            found = {}
            for name in value.__struct_fields__:
                old = getattr(value, name)
                new = old if name in UNCUT_FIELDS else _cut(old, MAX_LENGTHS.get(name, MAX_NAME))
                if new is not old:
                    found[name] = new
            return msgspec.structs.replace(value, **found) if found else value
        case _:
            return value
