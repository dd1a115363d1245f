"""Values whose texts can be sent. Pure.

Names of files are bytes to the kernel, and pickles may hold half a character: Python carries both as lone surrogates,
which no encoder of JSON takes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

Value = TypeVar("Value", bound=msgspec.Struct)


def printable(value: Value) -> Value:
    """The same with `?` for what is no UTF-8."""
    return msgspec.convert(_plain(msgspec.to_builtins(value)), type(value))


def _plain(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value
