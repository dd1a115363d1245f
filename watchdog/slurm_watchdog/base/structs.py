"""What all values have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import msgspec

from slurm_watchdog.base.python310 import is_class

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object):
        """For type checkers alone: nodes load no typing_extensions."""
        return lambda decorated: decorated


class _Values(msgspec.StructMeta):
    """Values are frozen and made by keywords, unless their class says otherwise."""

    def __new__(mcls, name: str, bases: tuple[type, ...], body: dict[str, Any], **settings: Any) -> Any:
        return super().__new__(mcls, name, bases, body, **{"frozen": True, "kw_only": True, **settings})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Struct(msgspec.Struct, metaclass=_Values, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Common settings of every value: immutable, by keyword only, defaults left off the wire.

    Values are trees, made once and never changed, so none can be part of a cycle: the collector of cycles
    need not walk over the millions of them that a large cluster has.
    """


S = TypeVar("S", bound=msgspec.Struct)


def only(kind: type[S], value: S) -> S:
    """The fields of `kind`, of a value of a type that extends it."""
    return kind(**{name: getattr(value, name) for name in kind.__struct_fields__})


def picked(kind: type[S], value: object, /, *names: str, **more: Any) -> S:
    """A `kind` with the attributes of `value` of these names (without names all that both have), and with `more`."""
    known = names or tuple(name for name in kind.__struct_fields__ if name not in more and hasattr(value, name))
    return kind(**{name: getattr(value, name) for name in known}, **more)


Leaves = tuple[type, ...]
V = TypeVar("V")


@cache
def fields_of(kind: type, leaves: Leaves, without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The fields of a struct that may hold such leaves, also further inside; `without` are names that may not, as
    `field` or `Class.field`."""

    def may_hold(hint: Any) -> bool:
        if not is_class(hint):
            return any(map(may_hold, get_args(hint)))
        if issubclass(hint, msgspec.Struct):
            return bool(fields_of(hint, leaves, without))
        return issubclass(hint, leaves) and not issubclass(hint, Enum)

    hints = get_type_hints(kind).items()
    return tuple(each for each, hint in hints if not {each, f"{kind.__name__}.{each}"} & without and may_hold(hint))


def mapped(
    value: V,
    leaves: Leaves,
    change: Callable[[str, Sequence[Any]], Sequence[Any]],
    without: frozenset[str] = frozenset(),
    field: str = "",
) -> V:
    """`value` (a tree of structs and builtin values) with its leaves of these types changed; the same object where none
    is. `change` gets the name of the struct's field, and leaves that stand in one row there."""
    found: Any = value
    if isinstance(value, msgspec.Struct):
        new = {}
        for each in fields_of(type(value), leaves, without):
            if (old := getattr(value, each)) and (now := mapped(old, leaves, change, without, each)) is not old:
                new[each] = now
        found = msgspec.structs.replace(value, **new) if new else value
    elif isinstance(value, list | tuple):
        is_row = all(type(each) in leaves for each in value)
        row = change(field, value) if is_row else [mapped(each, leaves, change, without, field) for each in value]
        if any(one is not two for one, two in zip(row, value, strict=True)):
            found = type(value)(row)
    elif isinstance(value, dict):
        found = {mapped(key, leaves, change): mapped(each, leaves, change, without) for key, each in value.items()}
    elif isinstance(value, leaves) and not isinstance(value, Enum):
        (found,) = change(field, (value,))
    return found  # type: ignore[no-any-return]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A tree of builtin values with each text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_texts(each, change) for key, each in value.items()}
    return [map_texts(each, change) for each in value] if isinstance(value, list | tuple) else value


def named(value: Any) -> Any:
    """A tree of builtin values in which each struct is a dictionary, also one that travels as a list; defaults are left
    off."""
    if isinstance(value, msgspec.Struct):
        found = [(each.name, getattr(value, each.name), each.default) for each in msgspec.structs.fields(value)]
        return {name: named(each) for name, each, default in found if each != default}
    if isinstance(value, list | tuple):
        return [named(each) for each in value]
    return {key: named(each) for key, each in value.items()} if isinstance(value, dict) else value


def printable(value: S) -> S:
    """The same with `?` for what is no UTF-8: names of files are bytes to the kernel, and pickles may hold half a
    character. Python carries both as lone surrogates, which no encoder of JSON takes."""
    texts = map_texts(msgspec.to_builtins(value), lambda text: text.encode(errors="replace").decode())
    return msgspec.convert(texts, type(value))
