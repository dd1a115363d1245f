"""Lines of a job's log that look like an error: the rows of `data/log_signatures.conf`, and what all of them
have in common.

Each matches something that programs print when they fail, never the bare word "error", which healthy logs are
full of. A row is tried only if one of its `needles` is in the line. The scanner
(slurm_watchdog.parse.training_log.line_scan) looks for the letters of all needles of all tables in whole
blocks of a log: the fewer different ones there are, the faster it reads. A needle that contains another one
("cuda error: " contains "error") costs it nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.entries import COMMON, Fields, read_shipped
from slurm_watchdog.knowledge.site_rows import SiteRows

GROUPS = ("header", "from_outside", "storage_full", "after_sigterm", "node_can_cause", "seen_by_others")
"""Values of `group`: see LogTable."""


class Signature(msgspec.Struct, frozen=True):
    """One way to write one error."""

    name: str
    needles: tuple[str, ...]  # In lower case, without digits at their ends; one of them is in every line that matches.
    regex: re.Pattern[str]
    consequence: bool = False  # It follows from something else, which is to be looked for before it.


class LogRow(msgspec.Struct, frozen=True):
    """One section: the signature, and the meaning of its name, given in one of its sections."""

    signature: Signature
    means: str  # Half a sentence; empty if another section of the name has it.
    groups: tuple[str, ...]


def log_row(fields: Fields) -> LogRow:
    """The row of a section [log NAME]."""
    signature = Signature(fields.name(), fields.needles(), fields.expression(re.IGNORECASE), fields.flag("consequence"))
    return LogRow(signature, fields.text("means"), fields.choices("group", GROUPS))


READERS = {"log": log_row, **COMMON}
_SHIPPED = read_shipped("log_signatures.conf", READERS)
_ROWS = _SHIPPED["log"]
_EXPRESSIONS: dict[str, re.Pattern[str]] = dict(_SHIPPED["expression"])
HARMLESS = _EXPRESSIONS["HARMLESS"]
GUESSES = _EXPRESSIONS["GUESSES"]
BOILERPLATE = _EXPRESSIONS["BOILERPLATE"]
COMMAND_LINE = _EXPRESSIONS["COMMAND_LINE"]
SPOKEN_BEFORE = _EXPRESSIONS["SPOKEN_BEFORE"]
ZERO_BEFORE = _EXPRESSIONS["ZERO_BEFORE"]
PLURAL_AFTER = _EXPRESSIONS["PLURAL_AFTER"]
ZERO_AFTER = _EXPRESSIONS["ZERO_AFTER"]
COPYING = _EXPRESSIONS["COPYING"]
UTILITY = _EXPRESSIONS["UTILITY"]
SOURCE_LINE = _EXPRESSIONS["SOURCE_LINE"]
HARMLESS_NEEDLES: tuple[str, ...] = dict(_SHIPPED["words"])["HARMLESS_NEEDLES"]

SIGNATURES: tuple[Signature, ...] = tuple(row.signature for row in _ROWS)
"""The rows of the package. Those in force, a site's included, are `log_table().signatures`."""


class LogTable(msgspec.Struct, frozen=True, eq=False):
    """The rows in force, and the meanings of their names."""

    signatures: tuple[Signature, ...]  # The first that matches names the line.
    means: Mapping[str, str]  # What each name means, half a sentence.
    consequences: frozenset[str]  # Names of the rows that never are a cause.
    from_outside: frozenset[str]  # The run is ended from outside: what comes after such a line follows from it.
    felt: frozenset[str]  # Consequences that a rank itself reports of what another did to it.
    headers: frozenset[str]  # They announce an error; what it is stands in the lines after them.
    storage_full: frozenset[str]
    after_sigterm: frozenset[str]  # What processes print that are ended while they work.
    node_can_cause: frozenset[str]
    """What a node may be the reason of: hardware, filesystems, memory. An exception of Python is the program's."""


def log_table() -> LogTable:
    """The rows in force in this process."""
    return _table(site_rows.current())


@lru_cache(maxsize=2)
def _table(site: SiteRows) -> LogTable:
    rows = site.before("log", _ROWS, lambda row: row.signature.name)

    def names(group: str) -> frozenset[str]:
        return frozenset(row.signature.name for row in rows if group in row.groups)

    consequences = frozenset(row.signature.name for row in rows if row.signature.consequence)
    from_outside = names("from_outside")
    means = {row.signature.name: row.signature.name for row in rows}
    means.update({row.signature.name: row.means for row in reversed(rows) if row.means})
    return LogTable(
        tuple(row.signature for row in rows),
        means,
        consequences,
        from_outside,
        consequences - from_outside - names("seen_by_others"),
        names("header"),
        names("storage_full"),
        names("after_sigterm"),
        names("node_can_cause"),
    )


GUESS_NEEDLES = ("cause", "reason", "1) ", "2) ", "3) ", "4) ", "5) ")
"""One of them is in each lower-cased line that GUESSES matches."""


BEFORE_CHARS = 60


def is_spoken_of(text: str, begin: int, end: int) -> bool:
    """Whether the words of an error (`begin` to `end`) are only spoken of: in a command, denied, or counted as none."""
    since = max(0, begin - BEFORE_CHARS)
    return (
        COMMAND_LINE.match(text) is not None
        or SPOKEN_BEFORE.search(text, since, begin) is not None
        or ZERO_AFTER.match(text, end) is not None
        or (ZERO_BEFORE.search(text, since, begin) is not None and PLURAL_AFTER.match(text, end) is not None)
    )


LOST_A_RANK = next(row.regex for row in SIGNATURES if "(?P<peer>" in row.regex.pattern)
"""A rank says in words of a program's own that it lost another one, which it names: the only groups are that name."""
