"""Values of a file as the values of the schema, with everything that is wrong with them: a walk over its types."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from operator import ge, gt, le
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from msgspec import Meta, Struct
from msgspec.structs import FieldInfo, fields

from slurm_watchdog.config.types import shown

Wrong = list[tuple[str, str]]
"""Dotted path and sentence of each thing that is wrong."""
_WORDS: Final = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_MAPPING: Final = "must be a mapping of keys and values"
_LARGEST: Final = 1e300
"""Below infinity."""


@cache
def options_of(section: type[Struct]) -> dict[str, FieldInfo]:
    """The options of a section by the key that they have in the file, with name, type and default."""
    hidden = getattr(section, "NO_OPTIONS", ())
    return {way_of(each.type, "key") or each.name: each for each in fields(section) if each.name not in hidden}


def metas_of(kind: Any) -> list[Meta]:
    """What is said of a type's values: their bounds, how they are read, written and checked."""
    return [each for each in get_args(kind)[1:] if isinstance(each, Meta)] if get_origin(kind) is Annotated else []


def way_of(kind: Any, way: str) -> Any:
    """The function that reads, writes or checks values of a type, or its key; None: none of its own."""
    return next((each.extra[way] for each in metas_of(kind) if each.extra and way in each.extra), None)


def convert(kind: Any, value: Any, at: str, wrong: Wrong) -> Any:
    """`value`, which stands at `at`, as one of `kind`. What is wrong goes to `wrong`: then the result is none."""
    before, read = len(wrong), way_of(kind, "read")
    try:
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        found = _plain(plain, read(value) if read else value, at, wrong)
        if len(wrong) == before:
            for meta in metas_of(kind):
                _check_bounds(meta, found, way_of(kind, "write") or str, shown(value))
            if check := way_of(kind, "check"):
                check(found)
        return found
    except ValueError as error:
        wrong.append((at, str(error)))
        return None


def _plain(kind: Any, value: Any, at: str, wrong: Wrong) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):  # of one type and None, or "not set"
        return None if value is None and types.NoneType in inner else convert(inner[0], value, at, wrong)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"must be a list, got {shown(value)}")
        return tuple(convert(inner[0], each, f"{at}[{index}]", wrong) for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(_MAPPING)
        return {
            convert(inner[0], key, f"{at}.{key}", wrong): convert(inner[1], each, f"{at}.{key}", wrong)
            for key, each in value.items()
        }
    if origin is Literal or issubclass(kind, Enum):
        choices = inner or tuple(kind)
        if not isinstance(value, str) or value not in choices:
            known = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise ValueError(f"must be {known}, got {shown(value)}")
        return value if origin is Literal else kind(value)
    if issubclass(kind, Struct):
        return _section(kind, value, at, wrong)
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind is float and not -_LARGEST < value < _LARGEST):
        quotes = ": YAML reads on, off, yes and no as true and false, so write them in quotes"
        as_read = quotes if kind is str and isinstance(value, bool) else ""
        raise ValueError(f"must be {_WORDS[kind]}, got {shown(value)}{as_read}")
    return kind(value)


def _section(section: type[Struct], value: Any, at: str, wrong: Wrong) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(_MAPPING)
    before, found, options = len(wrong), dict[str, Any](), options_of(section)
    for key in value:
        if key not in options:
            unknown = getattr(section, "UNKNOWN", "unknown key")
            wrong.append((_below(at, str(key)), f"{unknown}{did_you_mean(str(key), options)}"))
    for key, option in options.items():
        if key in value:
            found[option.name] = convert(option.type, value[key], _below(at, key), wrong)
        elif option.required:
            wrong.append((_below(at, key), "is missing"))
    if len(wrong) > before:
        return None
    made: Any = section(**found)
    for problem in made.problems():
        key, _, sentence = problem.partition(": ")
        wrong.append((_below(at, key), sentence))
    return made


def _below(at: str, key: str) -> str:
    return f"{at}.{key}".strip(".")


def did_you_mean(given: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """The end of a sentence about a word that is not known."""
    from difflib import get_close_matches

    close = get_close_matches(given, known, n=1)
    return f"; did you mean {str(close[0])!r}?" if close else f"; known: {', '.join(known)}"


def _check_bounds(meta: Meta, value: Any, write: Callable[[Any], str], given: str) -> None:
    """Raises ValueError with the range for a value outside of it."""
    if meta.min_length is not None and len(value) < meta.min_length:
        raise ValueError("must not be empty")
    if meta.max_length is not None and len(value) > meta.max_length:
        raise ValueError(f"must have {meta.max_length} characters at most, got {given}")
    bounds = [("greater than", meta.gt, gt), ("at least", meta.ge, ge), ("at most", meta.le, le)]
    set_here = [(f"{words} {write(bound)}", holds(value, bound)) for words, bound, holds in bounds if bound is not None]
    if not all(holds for _, holds in set_here):
        raise ValueError(f"must be {' and '.join(words for words, _ in set_here)}, got {given}")
