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


def all_or_none(listed: tuple[tuple[T, ...], tuple[str, ...]]) -> tuple[T, ...]:
    """The rows of a listing, given with a sentence about each that was left out. Raises ParseError if one was."""
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
