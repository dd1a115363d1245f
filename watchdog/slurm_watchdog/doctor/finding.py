"""A finding of the doctor: one sentence, the evidence, and the line to add. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct

F = TypeVar("F")


class Level(StrEnum):
    """How much it matters."""

    HINT = "hint"
    """Worth knowing; nothing is wrong."""
    WARNING = "warning"
    """Something will not work when it is needed."""
    CRITICAL = "critical"
    """Nothing is protected."""
    UNKNOWN = "unknown"
    """It could not be seen, and matters."""


class Advice(Struct, frozen=True):
    """One finding."""

    rule: str
    level: Level
    sentence: str
    evidence: str = ""
    add: str = ""
    """The line, or the command, that mends it."""
    where: str = ""
    """In which file, or on which node, it belongs."""


Rule = Callable[[F], Iterable[Advice]]


ORDER = (Level.CRITICAL, Level.UNKNOWN, Level.WARNING, Level.HINT)
CODES = {Level.CRITICAL: 2, Level.UNKNOWN: 3, Level.WARNING: 1, Level.HINT: 0}


def examine(facts: F, rules: Iterable[Rule[F]]) -> tuple[Advice, ...]:
    """What all rules say, the worst first."""
    found: Iterator[Advice] = (advice for rule in rules for advice in rule(facts))
    return tuple(sorted(found, key=lambda advice: ORDER.index(advice.level)))


def exit_code(advice: Iterable[Advice]) -> int:
    """0 nothing, 1 warning, 2 critical, 3 unknown; an evil that is known outranks blindness, blindness a warning."""
    levels = {each.level for each in advice}
    return next((CODES[level] for level in ORDER if level in levels), 0)
