"""Words for people: text that users wrote made harmless, times, ages, and tables that are plain when piped.

Job names, paths and log lines come from users. They pass `clean` before anything prints them, and they are
printed as rich's Text, which reads no markup.
"""

from __future__ import annotations

import importlib.util
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal

import click

from slurm_watchdog.base.text import columns

if TYPE_CHECKING:
    from rich.console import Console

LEAST_SENTENCE = 34
"""Columns for sentences in a table on a narrow terminal: fewer and every second line is one word."""
_TERMINAL_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: window title, links
    r"|\x1b[@-Z\\-_]"
)
_HARMLESS_CATEGORIES = frozenset("LMNPS")
"""First letters of Unicode's categories: letters, marks, numbers, punctuation, symbols."""


def clean(text: object) -> str:
    """One line without control characters, terminal sequences and invisible or direction-changing characters."""
    given = str(text)
    if (
        given.isascii() and given.isprintable()
    ):  # most of all text, and a status of a large cluster has thousands of cells
        return given.rstrip()
    bare = _TERMINAL_SEQUENCE.sub("", given)
    kept = (
        each if unicodedata.category(each)[0] in _HARMLESS_CATEGORIES else " " if each.isspace() else ""
        for each in bare
    )
    return "".join(kept).rstrip()


def clean_lines(text: object) -> list[str]:
    """The same for text of several lines."""
    return [clean(line) for line in str(text).splitlines()]


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3.5 h`, `2.0 d`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds else "0 s"
    for limit, unit_s, unit, digits in ((120, 1, "s", 0), (7200, 60, "min", 0), (172800, 3600, "h", 1)):
        if seconds < limit:
            return f"{seconds / unit_s:.{digits}f} {unit}"
    return f"{seconds / 86400:.1f} d"


def moment(at: float) -> str:
    """Date and time where the reader is, to the second."""
    try:
        return datetime.fromtimestamp(at, tz=timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"epoch {at:g}"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 job`, `3 jobs`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def shown(value: int | None) -> str:
    """The number; `-` for None."""
    return "-" if value is None else str(value)


def newest_checkpoint(step: int | None, age_s: float | None) -> str:
    """Its step, or where that is not known its age."""
    unknown = step is None and age_s is not None
    return f"saved {duration(round(age_s or 0.0))} ago, step unknown" if unknown else shown(step)


def fold_nodes(nodes: Sequence[str]) -> str:
    """`n[1-3,7]`, as Slurm's users write it."""
    from slurm_watchdog.base.text import fold

    return clean(",".join(fold(nodes))) if nodes else "-"


def screen() -> Console:
    """Standard output. Colours, bold and dim only on a terminal, and never with NO_COLOR."""
    from rich.console import Console

    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, color_system=colours)


def _is_drawn() -> bool:
    """Whether standard output is a terminal, and rich is here: the package for nodes prints plain text."""
    return importlib.util.find_spec("rich") is not None and screen().is_terminal


def sentence(text: str, style: str = "") -> None:
    """One line, cleaned; coloured, and wrapped at words, on a terminal."""
    if not _is_drawn():
        click.echo(clean(text))
        return
    from rich.text import Text

    console = screen()
    console.print(Text(clean(text), style=style), soft_wrap=not console.is_terminal)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str] = (),
    *,
    wanted: Sequence[int] = (),
    wraps: int | None = None,
) -> None:
    """A table: drawn and wrapped on a terminal, columns of plain text without any wrapping elsewhere.

    `styles` has one for each row, or is empty. `wanted` are the columns in the order in which a narrow
    terminal leaves room for them; without it a table that is too wide becomes paragraphs. `wraps` is the
    column of sentences: it gets the width that is left.
    """
    if not rows:
        return
    cells = [[clean(cell) for cell in row] for row in rows]
    sentences: str | None = None
    if not _is_drawn():
        click.echo(columns([list(headings), *cells]))
        return
    console = screen()
    if wanted:
        kept = fitting(headings, cells, wanted, console.width, {} if wraps is None else {wraps: LEAST_SENTENCE})
        sentences = None if wraps is None else headings[wraps]
        headings, cells = [headings[i] for i in kept], [[row[i] for i in kept] for row in cells]
    elif wraps is None and _needed(headings, cells) > console.width:
        _paragraphs(console, headings, cells, styles)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        drawn.add_column(heading, no_wrap=bool(wanted) and heading != sentences, overflow="fold")
    for index, row in enumerate(cells):
        drawn.add_row(*(Text(cell) for cell in row), style=styles[index] if styles else None)
    console.print(drawn, soft_wrap=False)


def _needed(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """How wide a table has to be in which no word is broken."""
    words = ([heading, *(word for row in cells for word in row[i].split())] for i, heading in enumerate(headings))
    return sum(max(map(len, column)) + 3 for column in words)


def fitting(
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    wanted: Sequence[int],
    width: int,
    widest: Mapping[int, int],
) -> list[int]:
    """The columns that fit beside each other, in their order; the first two of `wanted` always. `widest` has
    how wide some of them count at most."""
    from rich.cells import cell_len

    kept: list[int] = []
    left = width
    for column in wanted:
        needed = max(map(cell_len, (headings[column], *(row[column] for row in cells)))) + 3
        needed = min(needed, widest.get(column, needed))
        if needed <= left or len(kept) < 2:
            kept.append(column)
            left -= needed
    return sorted(kept)


def _paragraphs(
    console: Console, headings: Sequence[str], cells: Sequence[Sequence[str]], styles: Sequence[str]
) -> None:
    """On a narrow terminal each row is a few lines: every value with the name of its column."""
    from rich.text import Text

    for index, row in enumerate(cells):
        named = [(name, cell) for name, cell in zip(headings, row, strict=True) if cell not in ("", "-")]
        text = Text(style=styles[index] if styles else "")
        for number, (name, cell) in enumerate(named):
            text.append("  " if number else "").append(f"{name} ", style="dim").append(cell)
        console.print(text, soft_wrap=False)
