"""Files in which a site keeps rows of its own: text -> rows, each checked, every error at once. Pure.

What a site writes may be wrong or costly, so it is held to more than the rows of the package: the form of
each expression bounds what it can cost (slurm_watchdog.base.regex_cost), it sees the first characters of a
line only, and each row brings an example that it matches and a look-alike that it does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.regex_cost import MAX_LENGTH, SEEN_CHARS, why_costly
from slurm_watchdog.knowledge.entries import (
    MAX_TEXT,
    PART,
    Entry,
    Reader,
    parse_entries,
    parts_of,
    rows_of,
    shown,
    with_parts,
)
from slurm_watchdog.knowledge.kernel_signatures import SIGNATURES as KERNEL
from slurm_watchdog.knowledge.kernel_signatures import kernel_row
from slurm_watchdog.knowledge.log_signatures import SIGNATURES, log_row
from slurm_watchdog.knowledge.progress_patterns import PATTERNS, SIGNS, progress_row, sign_row
from slurm_watchdog.knowledge.site_rows import SiteRows, SiteText
from slurm_watchdog.knowledge.stack_frames import READERS as FRAME_READERS
from slurm_watchdog.knowledge.xids import xid_row

READERS: Final[Mapping[str, Reader]] = {
    "log": log_row,
    "progress": progress_row,
    "sign": sign_row,
    "kernel": kernel_row,
    "xid": xid_row,
    "frame": FRAME_READERS["frame"],
    "native": FRAME_READERS["native"],
}
MAX_ROWS = 500  # Of a site, in all its files. The package has 720.
MAX_LINES = 40  # Alternatives of one expression.
LETTERS = 3
"""ASCII letters that a needle has at least: blocks are searched for the letters of all, and rare ones cost nothing."""
SHIPPED_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "log": frozenset(row.name for row in SIGNATURES),
    "progress": frozenset(row.name for row in PATTERNS),
    "sign": frozenset(row.name for row in SIGNS),
    "kernel": frozenset(row.name for row in KERNEL),
}
"""Of kinds whose rows have names. A site's Xid always replaces the package's; a frame's is a class of many rows."""
ANCHORED = ("kernel", "frame", "native")
"""Kinds whose expressions are matched from the beginning of a text; the others are searched for in a line."""
EXPRESSIONS = ("pattern", "function", "file")
_GROUPS = frozenset({"step", "total", "step_s", "step_ms", "rate", "epoch", "epochs", "count", "updates", "loss"})
_WHOLE = late_regex(r"\(\?P<(step|total|epoch|epochs|updates)>(?!\\d(?:\+|\{\d+(?:,\d*)?\})\))")
_FRAME = late_regex(r"(\S+) \((.+)\)")


class Bounded:
    """An expression that sees the first SEEN_CHARS characters of a text only. Called as an re.Pattern is."""

    def __init__(self, regex: re.Pattern[str]) -> None:
        self._regex = regex
        self.pattern, self.flags, self.groupindex = regex.pattern, regex.flags, regex.groupindex

    def search(self, text: str) -> re.Match[str] | None:
        """As re.Pattern.search."""
        return self._regex.search(text, 0, SEEN_CHARS)

    def match(self, text: str) -> re.Match[str] | None:
        """As re.Pattern.match."""
        return self._regex.match(text, 0, SEEN_CHARS)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """As re.Pattern.fullmatch; None for a longer text."""
        return self._regex.fullmatch(text) if len(text) <= SEEN_CHARS else None


def read_site(texts: Sequence[SiteText], known_parts: Mapping[str, str]) -> tuple[SiteRows, list[str]]:
    """The rows of a site's files, in their order, and what is wrong with them, a sentence each.
    `known_parts`: expressions of the package that the rows may name. With anything wrong the rows are not to
    be used."""
    entries: list[Entry] = []
    problems: list[str] = []
    for each in texts:
        if len(each.text) > MAX_TEXT:
            problems.append(f"{each.file}: is longer than {MAX_TEXT} characters")
            continue
        found, wrong = parse_entries(each.text, each.file)
        entries += found
        problems += wrong
    if len(entries) > MAX_ROWS:
        problems.append(f"{entries[MAX_ROWS].place}: is row {MAX_ROWS + 1}; a site may have {MAX_ROWS}")
        return SiteRows(), problems
    parts = {**known_parts, **parts_of(entries)}
    replaced: set[tuple[str, str]] = set()
    plain = []
    for entry in entries:
        problems += _costs(entry, parts)
        values = dict(entry.values)
        if values.pop("replaces", ()) == ("yes",):
            if entry.name not in SHIPPED_NAMES.get(entry.kind, ()):
                problems.append(f"{entry.place}: `replaces`: the package has no {entry.kind} row of this name")
            replaced.add((entry.kind, entry.name))
        plain.append(replace(entry, values=values))
    rows = rows_of(plain, READERS, parts)
    problems += rows.problems
    for kind, found_rows in rows.by_kind.items():
        for entry, row in found_rows:
            problems += _checked(kind, entry, row)
    problems += _without_meaning(rows.by_kind.get("log", ()))
    bounded = {kind: tuple(_bounded(row) for _, row in found) for kind, found in rows.by_kind.items()}
    return SiteRows(bounded, frozenset(replaced)), problems


def _costs(entry: Entry, parts: Mapping[str, str]) -> Iterator[str]:
    for key in EXPRESSIONS:
        lines = entry.values.get(key, ())
        if len(lines) > MAX_LINES:
            yield f"{entry.place}: `{key}` has {len(lines)} lines; {MAX_LINES} are possible"
        for line in lines:
            if len(line) > MAX_LENGTH:
                yield f"{entry.place}: a line of `{key}` is longer than {MAX_LENGTH} characters"
                continue
            if entry.kind == PART:
                continue
            try:
                costly = why_costly(with_parts(line, parts), anchored=entry.kind in ANCHORED)
            except (re.error, Warning, RecursionError, OverflowError):
                continue  # the reader of the row says so
            if costly:
                yield f"{entry.place}: `{key}: {line}` may take very long on some lines: {costly}"


def _checked(kind: str, entry: Entry, row: Any) -> Iterator[str]:
    needed = ("source",) if kind == "xid" else ("source", "example", "not")
    for key in needed:
        if not any(entry.values.get(key, ())):
            yield f"{entry.place}: needs a line `{key}: …`"
    if getattr(row, "may_exclude_node", False) and (row.severity != "critical" or row.consequence):
        yield f"{entry.place}: `excludes_node` is for what is critical and no consequence"
    for needle in entry.values.get("needle", ()):
        if sum(each.isascii() and each.isalpha() for each in needle) < LETTERS:
            yield f"{entry.place}: needle {needle!r} has fewer than {LETTERS} letters: most lines would have to be parsed"
    if kind == "kernel":
        for head in row.heads:
            if len(head) != 3 or head != head.lower():
                yield f"{entry.place}: `begins: {head}` has to be three characters in lower case"
    if kind in ("progress", "sign"):
        yield from _groups(entry, row)
    for line in entry.values.get("example", ()):
        if kind != "xid" and not _matches(kind, row, shown(line)):
            yield f"{entry.place}: does not match its example {line[:100]!r} (in its first {SEEN_CHARS} characters)"
    for line in entry.values.get("not", ()):
        if kind != "xid" and _matches(kind, row, shown(line)):
            yield f"{entry.place}: matches {line[:100]!r}, which it should not"


def _groups(entry: Entry, row: Any) -> Iterator[str]:
    regex = row.pattern.regex if hasattr(row, "pattern") else row.regex
    for name in sorted(set(regex.groupindex) - _GROUPS):
        yield f"{entry.place}: unknown group {name!r}; known are {', '.join(sorted(_GROUPS))}"
    if hasattr(row, "pattern") and not {"step", "count", "updates"} & set(regex.groupindex):
        yield f"{entry.place}: needs a group (?P<step>…), (?P<updates>…) or (?P<count>…)"
    if hasattr(row, "pattern") and row.pattern.in_epoch and not {"step", "epoch"} <= set(regex.groupindex):
        yield f"{entry.place}: with `in_epoch` needs the groups step and epoch"
    for match in _WHOLE.finditer(regex.pattern):
        yield rf"{entry.place}: group {match[1]} has to be (?P<{match[1]}>\d+)"


def _matches(kind: str, row: Any, line: str) -> bool:
    if kind == "frame":
        found = _FRAME.fullmatch(line)
        return found is not None and all(
            re.fullmatch(pattern, text[:SEEN_CHARS]) for pattern, text in zip(row[1:], found.groups(), strict=True)
        )
    if kind == "native":
        return re.fullmatch(row[1], line[:SEEN_CHARS]) is not None
    low = line.lower()
    if kind == "kernel":
        begins = not row.heads or low[:3] in row.heads
        return (
            begins and any(needle in low for needle in row.needles) and row.regex.match(line[:SEEN_CHARS]) is not None
        )
    own = row.signature if kind == "log" else row.pattern if kind == "progress" else row
    return any(needle in low for needle in own.needles) and own.regex.search(line[:SEEN_CHARS]) is not None


def _without_meaning(rows: Sequence[tuple[Entry, Any]]) -> Iterator[str]:
    meant = {row.signature.name for _, row in rows if row.means} | SHIPPED_NAMES["log"]
    for entry, row in rows:
        if row.signature.name not in meant:
            yield f"{entry.place}: needs a line `means: …`, half a sentence that says what the error is"
            meant = meant | {row.signature.name}


def _bounded(row: Any) -> Any:
    """The row with expressions that see the first characters only."""
    if isinstance(row, tuple):  # a frame: whole-match expressions
        return (row[0], *(rf"(?=[\s\S]{{0,{SEEN_CHARS}}}\Z)(?:{each})" for each in row[1:]))
    inner = next((name for name in ("signature", "pattern") if hasattr(row, name)), None)
    if inner is not None:
        return replace(row, **{inner: _bounded(getattr(row, inner))})
    return replace(row, regex=Bounded(row.regex)) if hasattr(row, "regex") else row
