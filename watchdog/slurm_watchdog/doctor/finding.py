"""A finding of the doctor: one sentence, the evidence, and the line to add. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

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


class Advice(Struct, frozen=True, kw_only=True):
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


@dataclass(frozen=True)
class Check(Generic[F]):
    """A rule that is a row of a table: one advice where `when` holds of the facts. A text, or the level, that
    depends on the facts is a function of them."""

    rule: str
    level: Level | Callable[[F], Level]
    when: Callable[[F], object]
    sentence: str | Callable[[F], str]
    evidence: str | Callable[[F], str]
    add: str | Callable[[F], str]

    def __call__(self, facts: F) -> Iterator[Advice]:
        if self.when(facts):
            level = self.level if isinstance(self.level, Level) else self.level(facts)
            sentence, evidence, add = (
                text if isinstance(text, str) else text(facts) for text in (self.sentence, self.evidence, self.add)
            )
            yield Advice(rule=self.rule, level=level, sentence=sentence, evidence=evidence, add=add)


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
