"""A finding of the doctor: one sentence, the evidence, and the line to add; and the rules, rows of rules.conf."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import fold, plural

Facts = Mapping[str, object]  # What was read, by the names that rules.conf uses; None, or not there: not known.
SHOWN_CHARS = 200
_SUBJECT = re.compile(r"^\[(\w+)\]\n", re.MULTILINE)
_RULE = re.compile(r"^(\w+) (\S+) if (.+)\n  (.+)\n  (.+) => (.+)$", re.MULTILINE)
_WORD = re.compile(r"(!?)(\w+)(?:(<|>|!=|=|!~|~)(.+))?")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Level(StrEnum):
    """How much it matters, the worst first."""

    CRITICAL = "critical"  # Nothing is protected.
    UNKNOWN = "unknown"  # It could not be seen, and matters.
    WARNING = "warning"  # Something will not work when it is needed.
    HINT = "hint"  # Worth knowing; nothing is wrong.


ORDER = tuple(Level)
CODES = {Level.CRITICAL: 2, Level.UNKNOWN: 3, Level.WARNING: 1, Level.HINT: 0}


class Advice(Struct, kw_only=False):
    """One finding."""

    rule: str
    level: Level
    sentence: str
    evidence: str = ""
    add: str = ""  # The line, or the command, that mends it.
    where: str = ""  # In which file, or on which node, it belongs.


class Names(tuple[str, ...]):
    """Names of nodes or jobs: in ranges in a sentence, `{x:node}` counts them."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec:
            return f"{len(self):,}" if spec == "#" else plural(len(self), spec)
        return ", ".join(fold(self))[:SHOWN_CHARS]


@cache
def rules() -> Mapping[str, list[tuple[str, ...]]]:
    """The rows of rules.conf by subject: name, level, condition, and the texts with {FACT} in them: sentence, evidence,
    what to add."""
    _, *parts = _SUBJECT.split(Path(__file__).with_name("rules.conf").read_text(encoding="utf-8"))
    return {name: _RULE.findall(rows) for name, rows in zip(parts[::2], parts[1::2], strict=True)}


def examine(subject: str, facts: Facts) -> tuple[Advice, ...]:
    """What the rules of `subject` find, in their order; `where` is one of its facts."""
    found = []
    where = str(facts.get("where", ""))
    for name, level, condition, *texts in rules()[subject]:
        if all(holds(word, facts) for word in condition.split()):
            sentence, evidence, add = (text.format_map(facts) for text in texts)
            word, _, either = level.rpartition("?")
            yes, _, no = either.partition(":")
            how_bad = Level(yes if not word or holds(word, facts) else no)
            found.append(Advice(name, how_bad, sentence, evidence, add, where))
    return tuple(found)


def holds(word: str, facts: Facts) -> bool:
    """Whether one word of a rule's condition holds; none does of what is not known."""
    match = _WORD.fullmatch(word)
    assert match is not None, word
    no, name, sign, given = match.groups()
    value = facts.get(name)
    if value is None:
        return False
    if sign is None:
        return bool(value) is not bool(no)
    if sign in ("<", ">"):
        number = _NUMBER.match(str(value))  # `300 sec`, `24.11.5`
        return number is not None and (float(number[0]) - float(given)) * (1 if sign == ">" else -1) > 0
    found = re.search(given, str(value)) is not None if "~" in sign else str(value) in given.split(",")
    return found is not sign.startswith("!")


def ranked(found: Iterable[Advice]) -> tuple[Advice, ...]:
    """The same, the worst first, and each hint once, however often a script has what it is about."""
    kept: dict[Advice | str, Advice] = {}
    for each in found:
        kept.setdefault(each.rule if each.level is Level.HINT else each, each)
    return tuple(sorted(kept.values(), key=lambda each: ORDER.index(each.level)))


def exit_code(advice: Iterable[Advice]) -> int:
    """0 nothing, 1 warning, 2 critical, 3 unknown; an evil that is known outranks blindness, blindness a warning."""
    return next((CODES[each.level] for each in ranked(advice)), 0)
