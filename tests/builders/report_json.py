"""The report in what an agent prints with --json, where each row names its fields."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from slurm_watchdog.model.report import Report


def report_of(printed: str | bytes) -> Report:
    """The report that was printed."""
    return msgspec.convert(as_sent(inspect.type_info(Report), msgspec.json.decode(printed)), Report)


def as_sent(kind: inspect.Type, value: Any) -> Any:
    """Plain data of a type, in which each struct names its fields, as it travels."""
    if isinstance(kind, inspect.UnionType):
        return next((as_sent(each, value) for each in kind.types if isinstance(each, inspect.StructType)), value)
    if isinstance(kind, inspect.CollectionType):
        return [as_sent(kind.item_type, each) for each in value]
    if not isinstance(kind, inspect.StructType) or not isinstance(value, dict):
        return value
    found = {each.name: as_sent(each.type, value[each.name]) for each in kind.fields if each.name in value}
    if not kind.array_like:
        return found
    return [found[each.name] if each.name in found else msgspec.to_builtins(each.default) for each in kind.fields]
