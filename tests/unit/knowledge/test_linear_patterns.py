"""No expression of ours takes much longer than its text is long: logs, stacks, kernel lines, variables and
names are users' words, and a pattern that backtracks lets one line stop the agent or the controller. The rows
are all patterns that there are in the package, those written within functions included; the texts are made of
each pattern's own parts, so that they nearly match, again and again."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import time
from collections.abc import Hashable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import slurm_watchdog
from slurm_watchdog.base.late_regex import LateRegex

LENGTHS = (512, 1024, 2048, 4096)
"""Of a text. Lines and variables are cut at 4,096 characters or before."""
MOST_S = 0.015
"""What a text of the greatest length may cost: linear ones cost some microseconds, one quadratic part 20 ms
or more, two of them seconds."""
GROWS = 3.0
"""Twice the text, so many times the work: 2 is linear, 4 quadratic."""
SHORT, SHORT_S = 20, 0.02
"""Of the first text: one that takes exponential time would never end with a longer one."""
SUSPECT_S = 0.0005
"""Of the shortest text: what costs less is not tried with longer ones."""
MATCHING = frozenset({"match", "fullmatch", "search", "sub", "split", "findall", "finditer", "compile"})


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(slurm_watchdog.__path__, "slurm_watchdog."):
        if found.name.rpartition(".")[2] == "__main__":
            continue
        try:
            yield importlib.import_module(found.name)
        except ImportError:  # pyslurm's child, where there is none
            assert "pyslurm" in found.name, found.name


def inside(value: Any, depth: int = 4) -> Iterator[re.Pattern[Any]]:
    """The patterns in a value: tables are tuples, mappings and structs."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, LateRegex):
        yield value.search.__self__
    elif depth and isinstance(value, (tuple, list, set, frozenset)):
        for each in value:
            yield from inside(each, depth - 1)
    elif depth and isinstance(value, dict):
        yield from inside((*value, *value.values()), depth)
    elif depth and isinstance(value, msgspec.Struct):
        yield from inside(tuple(getattr(value, name) for name in value.__struct_fields__), depth - 1)
    elif depth and hasattr(type(value), "__dataclass_fields__"):
        yield from inside(tuple(getattr(value, name) for name in type(value).__dataclass_fields__), depth - 1)


def written(module: ModuleType) -> Iterator[re.Pattern[Any]]:
    """The patterns that a module writes where it uses them."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name), args=[ast.Constant(value=text), *_]):
                if name in MATCHING and isinstance(text, (str, bytes)):
                    yield re.compile(text)


@cache
def patterns() -> dict[str, re.Pattern[Any]]:
    found: dict[tuple[Hashable, int], tuple[str, re.Pattern[Any]]] = {}
    for module in modules():
        for pattern in (*inside(tuple(vars(module).values())), *written(module)):
            found.setdefault((pattern.pattern, pattern.flags), (module.__name__, pattern))
    return {f"{name.removeprefix('slurm_watchdog.')}-{n}": pattern for n, (name, pattern) in enumerate(found.values())}


def parts(pattern: re.Pattern[Any]) -> list[str]:
    """What texts are made of: words of the pattern, a character of each of its classes, and what lies between
    them in lines."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    plain = re.sub(r"\\[AbBdDsSwWZ]|\(\?[^:)]*[:>)]|[\\^$?*+(){}\[\]|]", "\n", text)
    words = sorted({word for word in plain.split("\n") if word and not word.isspace()}, key=len)[-12:]
    single = [
        "a",
        "0",
        " ",
        "-",
        ".",
        ":",
        "/",
        "=",
        "_",
        '"',
        "(",
        "[",
        "A",
        ",",
        "e-",
        "a ",
        "0.",
        "a.",
        "a-",
        "0 ",
        "0:",
        "a=",
        ": ",
        "tmp",
        "a/",
    ]
    found = [
        *single,
        "".join(words),
        " ".join(words),
        *words,
        *(f"{word} " for word in words),
        *(f"{word}0 " for word in words),
        *(f"a{word}" for word in words),
    ]
    return [each for each in dict.fromkeys(found) if each]


def texts(pattern: re.Pattern[Any], length: int) -> Iterator[tuple[str, Any]]:
    kind = type(pattern.pattern)
    found = parts(pattern)
    opening = "".join(word for word in found[25:37])
    for part in found:
        for begin in dict.fromkeys(("", opening)):
            text = (begin + part * (length // len(part) + 1))[:length] + "\x01"
            yield f"{begin!r} + {part!r} * n", text if kind is str else text.encode("latin-1", "replace")


def cost_s(pattern: re.Pattern[Any], text: Any) -> float:
    """Processor time of this process alone, the best of three where it is much: a busy machine makes nothing slow."""
    found = []
    for _ in range(3):
        begun = time.process_time()
        pattern.match(text)
        pattern.fullmatch(text)
        found.append(time.process_time() - begun)
        if found[-1] < MOST_S or found[-1] > 20 * MOST_S:
            break
    return min(found)


def backtracks(pattern: re.Pattern[Any]) -> str:
    """The text on which it does, in words; empty: on none of them."""
    short = texts(pattern, SHORT)
    for place, (words, text) in enumerate(texts(pattern, LENGTHS[0])):
        if (spent := cost_s(pattern, next(short)[1])) > SHORT_S:
            return f"{words}: {spent:.2f} s for {SHORT} characters"
        if cost_s(pattern, text) < SUSPECT_S:
            continue
        before = 0.0
        for length in LENGTHS[1:]:
            spent = cost_s(pattern, next(islice(texts(pattern, length), place, None))[1])
            if spent > MOST_S and spent > GROWS * before:
                return f"{words}: {spent:.2f} s for {length} characters"
            before = spent
    return ""


def test_every_pattern_of_the_package_takes_linear_time_of_a_hostile_text() -> None:
    found = patterns()
    assert len(found) > 800
    bad = {name: f"{pattern.pattern!r}: {why}" for name, pattern in found.items() if (why := backtracks(pattern))}
    assert not bad, "\n".join(f"{name}: {words}" for name, words in bad.items())


def test_a_pattern_that_begins_at_each_line_takes_linear_time_of_empty_lines() -> None:
    found = {name: pattern for name, pattern in patterns().items() if pattern.flags & re.MULTILINE}
    assert len(found) > 3
    assert [name for name, pattern in found.items() if _search_s(pattern) > MOST_S] == []


def _search_s(pattern: re.Pattern[Any]) -> float:
    text: Any = "\n" * LENGTHS[-1] * 4
    begun = time.process_time()
    pattern.search(text if isinstance(pattern.pattern, str) else text.encode())
    return time.process_time() - begun


@pytest.mark.parametrize(
    "expression",
    [
        r".*(?:py-spy|pystack)\b.*\b(?:dump|remote)\b(?:.*?(?:--pid|-p|remote)[ =](\d{2,8})\b)?.*$|.*gdb "
        r".*-p ?(\d+).*$",
        r"\s*(.+) \((.+?)(?::(\d{1,8}))?\)\s*",
        r"(?:a+)+$",
    ],
)
def test_a_pattern_that_backtracks_is_found(expression: str) -> None:
    assert backtracks(re.compile(expression))
