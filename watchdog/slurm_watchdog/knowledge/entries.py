"""Text of a knowledge file -> its rows, typed by the reader of each kind; every error at once. The package's own are
`data/*.conf`.

A file is made of sections, `[KIND NAME]`, with lines `key: value`. It is neither YAML nor TOML: the agent
reads 270 KB of rows when it starts, which takes PyYAML's C loader 170 ms and this 14 ms, and an expression is
written as it is, without escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_watchdog.base.late_regex import late_regex

_HEADER = re.compile(r"\[([a-z_]+) (\S.*)\]\s*$")
_LINE = re.compile(r"([a-z_]+):(?: (.*))?$")
_PART = re.compile(r"\{([A-Z][A-Z_]*)\}")
PART = "part"  # Kind of a section that only names an expression, for use in others as {NAME}.
JOINED = ("needle", "class")  # Keys of which a line may have several values, with ` || ` between them.
NOTES = ("source", "example", "not")
"""Keys that every row may have: where it comes from, lines it is for, and lines that look alike and are not."""
MAX_TEXT = 1024 * 1024  # Characters of one file: the shipped ones together have a quarter of it.


class Entry(msgspec.Struct, frozen=True):
    """One section, as it is written."""

    kind: str
    name: str
    file: str
    line: int  # Of its header, from 1.
    values: Mapping[str, tuple[str, ...]]

    @property
    def place(self) -> str:
        """`FILE:LINE [KIND NAME]`, for messages."""
        return f"{self.file}:{self.line}: [{self.kind} {self.name}]"


def parse_entries(text: str, file: str) -> tuple[list[Entry], list[str]]:
    """The sections of a file, and what is wrong with its lines, a sentence each."""
    entries: list[Entry] = []
    problems: list[str] = []
    values: dict[str, list[str]] = {}
    header: tuple[str, str, int] | None = None
    for number, line in enumerate(text[:MAX_TEXT].split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if match := _HEADER.match(line):
            if header is not None:
                entries.append(_entry(header, file, values))
            header, values = (match[1], match[2], number), {}
        elif header is None or not (match := _LINE.match(line)):
            problems.append(
                f"{file}:{number}: {line[:60]!r} is neither a header [KIND NAME] nor a line `key: value` below one"
            )
        else:
            if line != line.rstrip():
                problems.append(f"{file}:{number}: ends with a blank: remove it, or put the value in double quotes")
            texts = (match[2] or "").split(" || ") if match[1] in JOINED else [match[2] or ""]
            values.setdefault(match[1], []).extend(map(_value, texts))
    if header is not None:
        entries.append(_entry(header, file, values))
    return entries, problems


def _entry(header: tuple[str, str, int], file: str, values: Mapping[str, list[str]]) -> Entry:
    return Entry(header[0], header[1], file, header[2], {key: tuple(each) for key, each in values.items()})


def _value(text: str) -> str:
    """What is in double quotes without them, blanks included; otherwise without the blanks around it."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def shown(text: str) -> str:
    r"""An example as the program wrote it: \x1b in the file is the escape character."""
    return text.replace("\\x1b", "\x1b")


def parts_of(entries: Sequence[Entry]) -> dict[str, str]:
    """Name -> expression of the sections [part NAME]."""
    return {entry.name: "|".join(entry.values.get("pattern", ())) for entry in entries if entry.kind == PART}


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """An expression with what {NAME} in it stands for; nothing for a name that is not known."""
    return _PART.sub(lambda match: parts.get(match[1], ""), text)


class Fields(msgspec.Struct):
    """Takes the values of one entry out, each checked; `problems` says what is wrong with it, all at once."""

    entry: Entry
    parts: Mapping[str, str]
    late: bool = (
        False  # Expressions are compiled, and found to be wrong, when they are used: of rows that tests have tried.
    )
    problems: list[str] = msgspec.field(default_factory=list)
    _used: set[str] = msgspec.field(default_factory=lambda: set(NOTES))

    def texts(self, key: str, *, required: bool = False) -> tuple[str, ...]:
        """All values of `key`."""
        self._used.add(key)
        found = tuple(self.entry.values.get(key, ()))
        if required and not any(found):
            self._wrong(f"needs a line `{key}: …`")
        return found

    def text(self, key: str, *, required: bool = False) -> str:
        """The only value of `key`, with the parts that it names; empty if it has none."""
        found = self.texts(key, required=required)
        if len(found) > 1:
            self._wrong(f"`{key}` is given {len(found)} times; once is possible")
        return _PART.sub(lambda match: self.parts.get(match[1], match[0]), found[0]) if found else ""

    def flag(self, key: str) -> bool:
        """Whether `key: yes` is there."""
        found = self.text(key)
        if found not in ("", "yes", "no"):
            self._wrong(f"`{key}` is yes or no, not {found!r}")
        return found == "yes"

    def number(self, key: str) -> int:
        """A whole number; 0 if it is not given."""
        found = self.text(key)
        if not re.fullmatch(r"\d{0,9}", found):
            self._wrong(f"`{key}` is a whole number, not {found!r}")
            return 0
        return int(found or 0)

    def choice(self, key: str, known: Sequence[str], *, required: bool = True) -> str:
        """One of `known`; empty if it is none of them."""
        self.text(key, required=required)
        return next(iter(self.choices(key, known)), "")

    def choices(self, key: str, known: Sequence[str]) -> tuple[str, ...]:
        """Values, those of `known`."""
        found = self.texts(key)
        for each in found:
            if each not in known:
                self._wrong(f"`{key}` is one of {', '.join(known)}, not {each!r}")
        return tuple(each for each in found if each in known)

    def needles(self) -> tuple[str, ...]:
        """Values of `needle`: in lower case, for they are searched for in a line in lower case."""
        found = self.texts("needle", required=True)
        for each in found:
            if each != each.lower():
                self._wrong(f"needle {each!r} has capital letters: it is searched for in the line in lower case")
        return found

    def expression(self, flags: int) -> re.Pattern[str]:
        """The lines of `pattern`, which are alternatives, as one expression; one that matches nothing if it is wrong."""
        text = self.alternatives("pattern")
        if self.late:
            return late_regex(text, flags)
        try:
            return re.compile(text, flags)
        except (re.error, RecursionError, OverflowError) as error:
            self._wrong(f"`pattern` is not a valid regular expression: {error}")
            return re.compile(r"(?!)")

    def alternatives(self, key: str) -> str:
        """The lines of `key`, which are alternatives, as the text of one expression, not compiled."""
        text = "|".join(self.texts(key, required=True))
        for name in dict.fromkeys(_PART.findall(text)):
            if name not in self.parts:
                known = ", ".join(sorted(self.parts)) or "none"
                self._wrong(f"{{{name}}} in `{key}` is not a part; known: {known}")
        return with_parts(text, self.parts)

    def name(self) -> str:
        """The name of the section, which becomes a label and a word in messages."""
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", self.entry.name):
            self._wrong("a name has lower-case letters, digits and _, and begins with a letter")
        return self.entry.name

    def name_of(self, known: Sequence[str]) -> str:
        """The name of the section, which is one of `known`; empty if it is not."""
        if self.entry.name in known:
            return self.entry.name
        self._wrong(f"the name is one of {', '.join(known)}")
        return ""

    def number_of_name(self) -> int:
        """The name of the section as a whole number; -1 if it is none."""
        if re.fullmatch(r"\d{1,6}", self.entry.name):
            return int(self.entry.name)
        self._wrong("the name is a whole number")
        return -1

    def _wrong(self, what: str) -> None:
        self.problems.append(f"{self.entry.place}: {what}")

    def end(self) -> list[str]:
        """What is wrong, unknown keys included."""
        for key in self.entry.values:
            if key not in self._used:
                known = ", ".join(sorted(self._used))
                self._wrong(f"unknown key `{key}`; known are {known}")
        return self.problems


Reader = Callable[[Fields], Any]


CASES = ("any", "exact")


def _expression_row(fields: Fields) -> tuple[str, re.Pattern[str]]:
    any_case = fields.choice("case", CASES, required=False) == "any"
    return fields.entry.name, fields.expression(re.IGNORECASE if any_case else 0)


def _words_row(fields: Fields) -> tuple[str, tuple[str, ...]]:
    return fields.entry.name, fields.needles()


COMMON: Mapping[str, Reader] = {"expression": _expression_row, "words": _words_row}
"""What rows of a table have in common, by name: sections [expression NAME] and [words NAME]."""


class Rows(msgspec.Struct, frozen=True):
    """What files hold: rows by kind, each with the entry it comes from, and what is wrong, a sentence each."""

    by_kind: Mapping[str, tuple[tuple[Entry, Any], ...]]
    problems: tuple[str, ...] = ()

    def of(self, kind: str) -> Iterator[Any]:
        """The rows of one kind in their order."""
        return (row for _, row in self.by_kind.get(kind, ()))


def read_rows(text: str, file: str, readers: Mapping[str, Reader], *, late: bool = False) -> Rows:
    """A file's text becomes rows, by `readers`: kind -> what makes a row of its fields. `late`: see Fields."""
    entries, problems = parse_entries(text, file)
    rows = rows_of(entries, readers, parts_of(entries), late)
    return Rows(rows.by_kind, (*problems, *rows.problems))


def rows_of(
    entries: Sequence[Entry], readers: Mapping[str, Reader], parts: Mapping[str, str], late: bool = False
) -> Rows:
    """The same of sections that were parsed, with the expressions that they may name."""
    by_kind: dict[str, list[tuple[Entry, Any]]] = {}
    problems: list[str] = []
    for entry in entries:
        if entry.kind == PART:
            continue
        if entry.kind not in readers:
            problems.append(f"{entry.place}: unknown kind {entry.kind!r}; known are {', '.join(sorted(readers))}")
            continue
        fields = Fields(entry, parts, late)
        row = readers[entry.kind](fields)
        wrong = fields.end()
        problems += wrong
        if not wrong:
            by_kind.setdefault(entry.kind, []).append((entry, row))
    return Rows({kind: tuple(rows) for kind, rows in by_kind.items()}, tuple(problems))


DATA = Path(__file__).parent / "data"
_NOTES = re.compile(rf"^(?:{'|'.join(NOTES)}): .*$", re.MULTILINE)  # Half of the text, which no row keeps.


def read_shipped(name: str, readers: Mapping[str, Reader]) -> dict[str, tuple[Any, ...]]:
    """Kind -> rows of a file of the package. Raises ValueError with each error: a broken package must not start."""
    text = (DATA / name).read_text(encoding="utf-8")
    rows = read_rows(_NOTES.sub("", text), name, readers, late=True)
    if rows.problems:
        raise ValueError("\n".join(rows.problems))
    return {kind: tuple(rows.of(kind)) for kind in readers}


def shipped_parts() -> dict[str, str]:
    """Name -> expression of all sections [part NAME] of the package, which a site's rows may use."""
    found: dict[str, str] = {}
    for path in sorted(DATA.glob("*.conf")):
        found.update(parts_of(parse_entries(path.read_text(encoding="utf-8"), path.name)[0]))
    return found
