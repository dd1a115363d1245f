"""What people read in a terminal: users' text made harmless, templates, tables that fit its width.

Job names, paths and log lines come from users: each value of a template, each sentence and each cell passes `clean`.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from slurm_watchdog.base.text import duration, fold, plural, to_show, width_of
from slurm_watchdog.report.words import advice, as_text, hours, moment, more, node_time, who, with_reason

if TYPE_CHECKING:
    from jinja2 import Environment

NO_HEADER = "slurm_watchdog.no_header"  # In the meta of click's context: whether only the rows of tables are printed.
LEVELS = (("OK", "green"), ("WARNING", "yellow"), ("CRITICAL", "bold red"), ("UNKNOWN", "magenta"))
"""Of a monitoring plugin, by its exit code, with their styles."""
LEAST_SENTENCE = 34
"""Columns for the sentences of a table on a narrow terminal: with fewer every second line is one word."""
MARKS = str.maketrans({"«": "\1", "»": "\2", "│": "\3"})
"""What a template has around the style of a line, and between the cells of a row: no text of a user has these."""
STYLES = {
    "#": "1", "bold": "1", "dim": "2", "red": "31", "bold red": "1;31", "green": "32", "yellow": "33", "magenta": "35"
}  # fmt: skip
"""Escape sequences of the terminal. `#` is a heading, with an empty line above."""
_TERMINAL_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: window title, links
    r"|\x1b[@-Z\\-_]"
)
_HARMLESS_CATEGORIES = frozenset("LMNPS")
"""First letters of Unicode's categories: letters, marks, numbers, punctuation, symbols."""


def clean(text: object) -> str:
    """One line without control characters, terminal sequences and invisible or direction-changing characters."""
    return _harmless(str(text)).rstrip()


def _harmless(given: str) -> str:
    if given.isascii() and given.isprintable():  # most text, and a large cluster's status has thousands of cells
        return given
    bare = _TERMINAL_SEQUENCE.sub("", given)
    kept = (
        each if unicodedata.category(each)[0] in _HARMLESS_CATEGORIES else " " if each.isspace() else ""
        for each in bare
    )
    return "".join(kept)


def fold_nodes(names: Iterable[object]) -> str:
    """`n[1-3,7]`, as Slurm's users write it; ranks as `0-2,7`."""
    return clean(",".join(fold(map(str, names)))) or "-"


def drawn_columns() -> int | None:
    """Columns of the terminal that shows standard output; None where it is a file or a pipe: nothing is wrapped."""
    from shutil import get_terminal_size

    is_drawn = os.environ.get("FORCE_COLOR") or sys.stdout.isatty()
    return get_terminal_size().columns if is_drawn else None


def sentence(text: str, style: str = "") -> None:
    """One line, cleaned; coloured, and wrapped at words, on a terminal."""
    columns = drawn_columns()
    print_lines(_painted(each, style, columns) for each in _wrapped(clean(text), columns))


def show(template: str, **values: Any) -> None:
    """Prints a template of the folder `templates`."""
    print_lines(render(template, drawn_columns(), **values))


def render(template: str, columns: int | None, most: int = 999, **values: Any) -> list[str]:
    """The lines of a template; on a terminal none is wider than `columns`, and a sentence or cell has at most `most`.
    An empty line is left out, those with cells are a table of which the first has the headings."""
    text = _environment().get_template(template).render(values)
    lines: list[str] = []
    rows: list[tuple[str, list[str]]] = []
    context = click.get_current_context(silent=True)
    only_rows = context is not None and context.meta.get(NO_HEADER, False)
    for line in [*filter(str.strip, text.split("\n")), ""]:
        style, _, rest = line[1:].partition("\2") if line.startswith("\1") else ("", "", line)
        if "\3" in rest:
            rows.append((style, [cell.strip() for cell in rest.split("\3")]))
            continue
        lines += [*_table(rows, columns, most)][only_rows:]
        rows = []
        if only_rows:
            continue
        lines += [""] if style == "#" else []
        lines += [_painted(each, style, columns) for each in _wrapped(rest.rstrip(), columns, most) if line]
    return lines


@cache
def _environment() -> Environment:
    from pathlib import Path

    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = Path(__file__).with_name("templates")
    environment = Environment(  # noqa: S701 - not HTML: each value passes `finalize`
        loader=FunctionLoader(lambda name: (folder / f"{name}.txt.j2").read_text("utf-8").translate(MARKS)),
        finalize=lambda value: "-" if value is None else _harmless(str(value)),
        undefined=StrictUndefined,
        lstrip_blocks=True,
    )
    words = (advice, as_text, duration, fold_nodes, hours, moment, more, node_time, plural, to_show, who, with_reason)
    environment.filters |= {each.__name__: each for each in words}
    return environment


def redraw(look: Callable[[int, int], Iterable[str]], every_s: float) -> None:
    """Draws what `look` gives for so many columns and lines, until Ctrl-C. Afterwards the terminal is as it was."""
    from shutil import get_terminal_size

    from slurm_watchdog.base.loop import sleep

    click.echo("\x1b[?1049h\x1b[?25l", nl=False, color=True)
    try:
        while True:
            click.echo("\x1b[2J\x1b[H" + "\n".join(look(*get_terminal_size())), nl=False, color=True)
            sleep(every_s)
    except KeyboardInterrupt:
        pass
    finally:
        click.echo("\x1b[?25h\x1b[?1049l", nl=False, color=True)


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines that are clean, with their colours."""
    if printed := list(lines):
        click.echo("\n".join(printed), color=True)


def _painted(line: str, style: str, columns: int | None) -> str:
    is_plain = columns is None or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return line if is_plain or style not in STYLES else f"\x1b[{STYLES[style]}m{line}\x1b[0m"


def _wrapped(text: str, columns: int | None, most: int = 999) -> list[str]:
    """At words, indented as the first line is; what needs more than `most` lines ends with `…`."""
    if columns is None or width_of(text) <= columns:
        return [text]
    import textwrap

    indent = " " * (len(text) - len(text.lstrip(" -")))
    return textwrap.wrap(
        text, max(columns, 20), subsequent_indent=indent[:8], break_on_hyphens=False, max_lines=most, placeholder=" …"
    )


def _table(rows: Sequence[tuple[str, Sequence[str]]], columns: int | None, most: int) -> Iterator[str]:
    """The lines of a table of (style, cells); the first has the headings, and how many columns are always shown."""
    if len(rows) < 2:
        return
    keep = int(rows[0][0] or 99)
    cells = [[cell or "-" for cell in row] for _, row in rows]
    *widths, last = [max(map(width_of, column)) + 2 for column in zip(*cells, strict=True)]
    least = min(last, LEAST_SENTENCE)
    while columns is not None and len(widths) > keep and sum(widths) + least > columns + 2:
        widths.pop()
    offset = sum(widths)
    is_below = columns is not None and offset + least > columns + 2
    for number, ((style, _), row) in enumerate(zip(rows, cells, strict=True)):
        text = "".join(cell + " " * (width - width_of(cell)) for cell, width in zip(row, widths, strict=False))
        room = None if columns is None else columns - 4 if is_below else columns - offset
        first, *more = _wrapped(row[-1], room, most)
        lines = [*_wrapped(text.rstrip(), columns), f"    {first}"] if is_below else [text + first]
        lines += [" " * (4 if is_below else offset) + each for each in more]
        yield from (_painted(each, style if number else "bold", columns) for each in lines)
