"""The rows that a site added to the shipped ones, as this process has them in force. See docs/knowledge.md.

They are the one thing here that a process is given, once, before it parses its first line: an agent or a
controller by its configuration (SIGHUP starts it afresh, and its children are forked after that), a command
by its options. Every table asks for them by its function (`log_table()`, `all_rows()`, `describe_xid()`, …);
handing them down instead would take an argument through all of parse, diagnose and detect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from slurm_watchdog.base.structs import Struct

Row = TypeVar("Row")


class SiteText(Struct, kw_only=False):
    """One file of a site, as it was read."""

    file: str
    text: str


class SiteRows(msgspec.Struct, frozen=True, eq=False):
    """Rows by kind, in their order. Compared by identity, so that tables made of them can be kept."""

    by_kind: Mapping[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    replaced: frozenset[tuple[str, str]] = frozenset()  # Kind and name of the shipped rows that are not to be used.

    def before(self, kind: str, shipped: tuple[Row, ...], name_of: Callable[[Row], str]) -> tuple[Row, ...]:
        """The site's rows of this kind, and then those of `shipped` that it does not replace."""
        own = self.by_kind.get(kind, ())
        if not self.replaced:
            return (*own, *shipped)
        return (*own, *(row for row in shipped if (kind, name_of(row)) not in self.replaced))


NONE = SiteRows()
_in_force = [NONE]


def current() -> SiteRows:
    """Those in force in this process; none until `use`."""
    return _in_force[0]


def use(rows: SiteRows) -> None:
    """From now on the tables of this process begin with `rows`."""
    _in_force[0] = rows
