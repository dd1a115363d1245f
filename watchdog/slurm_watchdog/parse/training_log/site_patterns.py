"""Patterns of progress that a site wrote itself: what is refused when the configuration is loaded, and what they are on a node.

A regular expression may take for ever. One is accepted only if its form bounds what it can cost: nothing variable is repeated,
few repeats may take characters from one another, at most two match nearly any character, and it begins with none of these. It sees the first characters of a line only (slurm_watchdog.parse.training_log.line.OWN_CHARS). Pure.
"""

from __future__ import annotations

import re
import string
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from re import _constants as op  # type: ignore[attr-defined]  # the parser of the standard library: there is no public way to it
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from slurm_watchdog.knowledge.progress_patterns import Pattern

MAX_LENGTH = 300
"""Characters of a pattern."""
MAX_PATTERNS = 32
MAX_REPEATS = 12
MAX_WIDE = 2
"""Repeats that match nearly any character."""
LITERALS = 3
"""So many plain characters have to follow a repeat of nearly any character: they say where it ends."""
MAX_OVERLAPS = 2
"""Repeats that may take characters from one another: each may try as many ways as a line has characters."""
WIDE_CHARS = 80
"""So many of the hundred printable characters."""
GROUPS = frozenset({"step", "total", "loss", "step_seconds", "tokens"})
_ALPHABET = frozenset(map(ord, string.printable))
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D", op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S", op.CATEGORY_WORD: r"\w", op.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)

Chars = frozenset[int]
NONE: Chars = frozenset()


class _Refused(ValueError):
    """The form of a pattern may cost too much; the message says why."""


@dataclass
class _Cost:
    repeats: int = 0
    wide: int = 0
    overlaps: int = 0
    narrow: Chars = NONE
    """What narrow repeats match that no character between has ended for certain."""
    owed: int = 0
    """Plain characters that have to follow before anything else."""
    begun: bool = False
    """Whether something that is no repeat of anything stands before."""


def problem_of(text: str) -> str | None:
    """Why `text` is no pattern to be used, or None. Half a sentence, for behind the name of the option."""
    if len(text) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = re.compile(text)
        names = set(compiled.groupindex)
        if not names & {"step", "tokens"}:
            return "has no group (?P<step>...), nor (?P<tokens>...)"
        if names - GROUPS:
            return f"has a group {sorted(names - GROUPS)[0]!r}; known are {', '.join(sorted(GROUPS))}"
        if compiled.match("") is not None:
            return "matches an empty line"
        _walk(parser.parse(text), NONE, _Cost())
    except (re.error, Warning, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    except _Refused as refused:
        return f"may take very long on some lines: {refused}"
    return None


def compile_patterns(texts: Iterable[str]) -> tuple[Pattern, ...]:
    """Rows for those of `texts` that are fit to be used: an agent trusts no controller to have checked them."""
    kept = [text for text in list(texts)[:MAX_PATTERNS] if problem_of(text) is None]
    return tuple(Pattern(f"own_{number}", (), re.compile(text)) for number, text in enumerate(kept, 1))


def _walk(items: Iterable[Any], last: Chars, cost: _Cost) -> Chars:
    """Goes through a part of a pattern; `last` is what a repeat just before it matches. Returns that of its end."""
    for code, value in items:
        if code in _REPEATS:
            last = _repeat(value[0], value[1], value[2], last, cost)
        elif code is op.SUBPATTERN:
            last = _walk(value[3], last, cost)
        elif code is op.ATOMIC_GROUP:
            last = _walk(value, last, cost)
        elif code is op.BRANCH:
            last = NONE.union(*(_walk(branch, last, cost) for branch in value[1]))
        elif code in (op.ASSERT, op.ASSERT_NOT):
            _walk(value[1], NONE, cost)
        elif code in (op.GROUPREF, op.GROUPREF_EXISTS):
            raise _Refused("it refers back to a group")
        elif code is not op.AT:
            last, cost.begun, cost.owed = NONE, True, max(0, cost.owed - (code is op.LITERAL))
            if not _chars(code, value) & cost.narrow:
                cost.narrow = NONE
    return last


def _repeat(least: int, most: int, body: Any, last: Chars, cost: _Cost) -> Chars:
    if least == most:
        if most > 1 and _is_variable(body):
            raise _Refused("a repeat stands inside a repeat")
        return _walk(body, last, cost)
    if cost.owed:
        raise _Refused(f"fewer than {LITERALS} plain characters follow a repeat of nearly any character")
    cost.repeats += 1
    if cost.repeats > MAX_REPEATS:
        raise _Refused(f"it has more than {MAX_REPEATS} repeats and optional parts")
    if len(body) == 1 and (chars := _chars(*body[0])):
        _check_single(chars, most, last, cost)
        return chars | last if least == 0 else chars
    if most > 1:
        raise _Refused("a group is repeated; only single characters may be")
    return last | _walk(body, last, cost)


def _check_single(chars: Chars, most: int, last: Chars, cost: _Cost) -> None:
    if chars & last or (most > 1 and (chars & cost.narrow or cost.wide)):
        cost.overlaps += 1
        if cost.overlaps > MAX_OVERLAPS:
            raise _Refused(
                f"more than {MAX_OVERLAPS} of its repeats match what one before them matches as well"
            )
    if most == 1:
        return
    if len(chars) > WIDE_CHARS:
        cost.wide += 1
        if cost.wide > MAX_WIDE:
            raise _Refused(f"more than {MAX_WIDE} of its repeats match nearly any character")
        if not cost.begun:
            raise _Refused(
                "it begins with a repeat of nearly any character, and is looked for anywhere in a line"
            )
        cost.owed = LITERALS
        return
    cost.narrow = cost.narrow | chars


def _is_variable(items: Iterable[Any]) -> bool:
    return any(code in _REPEATS or code in (op.BRANCH, op.SUBPATTERN, op.ATOMIC_GROUP) for code, _ in items)


def _chars(code: Any, value: Any) -> Chars:
    """The printable characters that one item of a pattern matches; none if it is no single character."""
    if code is op.LITERAL:
        return frozenset({value})
    if code is op.NOT_LITERAL:
        return _ALPHABET - {value}
    if code is op.ANY:
        return _ALPHABET - {ord("\n")}
    if code is not op.IN:
        return NONE
    found = NONE.union(*(_members(*each) for each in value))
    return _ALPHABET - found if value[0][0] is op.NEGATE else found


def _members(code: Any, value: Any) -> Chars:
    if code is op.LITERAL:
        return frozenset({value})
    if code is op.RANGE:
        return frozenset(range(value[0], min(value[1], 0x2FFF) + 1))
    if code is op.CATEGORY:
        category = re.compile(_CATEGORIES[value])
        return frozenset(each for each in _ALPHABET if category.match(chr(each)))
    return NONE
