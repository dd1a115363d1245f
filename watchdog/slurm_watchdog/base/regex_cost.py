"""Whether the form of a regular expression bounds what it can cost: for those that a site writes itself.

A regular expression may take indefinitely. One is accepted only if its form bounds its cost: nothing variable
is repeated, few repeats may take characters from one another, at most two match nearly any character, and it
does not begin with one of these. It still has to be tried on the first SEEN_CHARS characters of a line only.
Pure.
"""

from __future__ import annotations

import string
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import msgspec

if sys.version_info >= (3, 11):  # there is no public way to the parser
    from re import _compiler as compiler  # novm
    from re import _constants as op  # novm
    from re import _parser as parser  # novm

    NEWER = (op.ATOMIC_GROUP, op.POSSESSIVE_REPEAT)
else:
    import sre_compile as compiler
    import sre_constants as op
    import sre_parse as parser

    NEWER = (object(), object())  # no expression of Python 3.10 has them

SEEN_CHARS = 300  # Characters of a line that a site's own expressions see: they bound what such an expression can cost.
MAX_LENGTH = 300  # Characters of an expression.
MAX_REPEATS = 12
MAX_WIDE = 2  # Repeats that match nearly any character.
MIN_LITERALS = 3  # So many plain characters have to follow a repeat of nearly any character: they say where it ends.
MAX_OVERLAPS = 2  # Repeats that may take characters from one another: each tries as many ways as a line is long.
WIDE_CHARS = 80  # So many of the hundred printable characters.
_PRINTABLE = frozenset(string.printable)
_ALPHABETS = frozenset(map(chr, range(0x3000)))  # Of programs, and their signs; beyond it what a class names.
_ATOMIC_GROUP, _POSSESSIVE_REPEAT = NEWER
_parser: Any = parser
_compiler: Any = compiler
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, _POSSESSIVE_REPEAT)

Chars = frozenset[str]
NO_CHARS: Chars = frozenset()


class _Refused(ValueError):
    """The form of a pattern may cost too much; the message says why."""


class _Cost(msgspec.Struct):
    repeats: int = 0
    wide: int = 0
    overlaps: int = 0
    narrow: Chars = NO_CHARS  # What narrow repeats match that no character between has ended for certain.
    owed: int = 0  # Plain characters that have to follow before anything else.
    begun: bool = False  # Whether something that is no repeat of anything stands before.


def why_costly(text: str, *, anchored: bool = False) -> str | None:
    """Why the expression `text` may take very long on some lines; None if its form bounds it. `anchored`: it
    is matched from the beginning of a text, and not searched for in it. Raises re.error or a Warning for what
    is no expression."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _walk(_parser.parse(text), NO_CHARS, _Cost(begun=anchored))
    except _Refused as refused:
        return str(refused)
    return None


def _walk(items: Iterable[Any], last: Chars, cost: _Cost) -> Chars:
    """Goes through a part of a pattern; `last` is what a repeat just before it matches. Returns that of its end."""
    for code, value in items:
        if code in _REPEATS:
            last = _repeat(value[0], value[1], value[2], last, cost)
        elif code is op.SUBPATTERN:
            last = _walk(value[3], last, cost)
        elif code is _ATOMIC_GROUP:
            last = _walk(value, last, cost)
        elif code is op.BRANCH:
            last = NO_CHARS.union(*(_walk(branch, last, cost) for branch in value[1]))
        elif code in (op.ASSERT, op.ASSERT_NOT):
            _walk(value[1], NO_CHARS, cost)
        elif code in (op.GROUPREF, op.GROUPREF_EXISTS):
            raise _Refused("it refers back to a group")
        elif code is not op.AT:
            last, cost.begun, cost.owed = NO_CHARS, True, max(0, cost.owed - (code is op.LITERAL))
            if not _chars(code, value) & cost.narrow:
                cost.narrow = NO_CHARS
    return last


def _repeat(least: int, most: int, body: Any, last: Chars, cost: _Cost) -> Chars:
    if least == most:
        if most > 1 and _is_variable(body):
            raise _Refused("a repeat is inside a repeat")
        return _walk(body, last, cost)
    if cost.owed:
        raise _Refused(f"fewer than {MIN_LITERALS} plain characters follow a repeat of nearly any character")
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
            raise _Refused(f"more than {MAX_OVERLAPS} of its repeats match what one before them matches as well")
    if most == 1:
        return
    if len(chars & _PRINTABLE) > WIDE_CHARS:
        cost.wide += 1
        if cost.wide > MAX_WIDE:
            raise _Refused(f"more than {MAX_WIDE} of its repeats match nearly any character")
        if not cost.begun:
            raise _Refused("it begins with a repeat of nearly any character, and is looked for anywhere in a line")
        cost.owed = MIN_LITERALS
        return
    cost.narrow = cost.narrow | chars


def _is_variable(items: Iterable[Any]) -> bool:
    return any(code in _REPEATS or code in (op.BRANCH, op.SUBPATTERN, _ATOMIC_GROUP) for code, _ in items)


def _chars(code: Any, value: Any) -> Chars:
    """The characters that one item of a pattern matches; none if it is no single character."""
    if code is op.LITERAL:
        return frozenset({chr(value)})
    if code not in (op.NOT_LITERAL, op.ANY, op.IN):
        return NO_CHARS
    one = _compiler.compile(_parser.SubPattern(_parser.State(), [(code, value)]))
    ends = (
        {chr(end) for kind, of in value if kind in (op.LITERAL, op.RANGE) for end in _ends(of)} if code is op.IN else ()
    )
    return frozenset(one.findall("".join(_ALPHABETS.union(ends))))


def _ends(of: Any) -> tuple[int, ...]:
    """Characters that stand in a class: one, or the first and last of a range."""
    return of if isinstance(of, tuple) else (of,)
