"""Pure: one row of a listing, field by field. What cannot be read is unknown, noted by name, and spoils
nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Raw = TypeVar("Raw")


class ParseError(ValueError):
    """Output that is cut short, or not what was asked for. Never take it for an empty answer."""


Listed = tuple[tuple[T, ...], tuple[str, ...]]
"""What was listed, and a sentence about each row that had to be left out."""


def all_or_none(listed: Listed[T]) -> tuple[T, ...]:
    """The rows of a listing. Raises ParseError if one was left out."""
    rows, dropped = listed
    if dropped:
        raise ParseError(dropped[0])
    return rows


@dataclass
class Fields:
    """Reads the fields of one row and remembers which of them could not be read."""

    unreadable: list[str] = field(default_factory=list)  # Names as in `SlurmJob` and `SlurmNode`.

    def read(self, name: str, rule: Callable[[Raw], T], raw: Raw, unknown: T) -> T:
        """`rule(raw)`; `unknown` where the rule cannot read it."""
        try:
            return rule(raw)
        except (ValueError, TypeError, OverflowError):
            self.unreadable.append(name)
            return unknown
