"""A value of a type of the wire with every field filled, so that nothing of it is left off."""

from __future__ import annotations

from typing import Any

from msgspec import inspect

NUMBERS = {"version": 1, "same_as": 0}  # A report that has all rows is a whole one.
TEXTS = {"syscall": "write", "wchan": "rpc_wait_bit", "state": "D", "pci_bus_id": "0000:c1:00.0"}


def filled(kind: inspect.Type, name: str = "") -> Any:
    """Plain data for one type; every field of every structure is there, every list has one element of each of
    its kinds."""
    match kind:
        case inspect.StructType():
            fields = {each.encode_name: filled(each.type, each.name) for each in kind.fields}
            if kind.array_like:
                return list(fields.values())
            return fields if kind.tag_field is None else {kind.tag_field: kind.tag, **fields}
        case inspect.UnionType():
            kinds = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            return filled(kinds[0], name)
        case inspect.CollectionType():
            inner = kind.item_type
            kinds = inner.types if isinstance(inner, inspect.UnionType) else (inner,)
            return [filled(each, name) for each in kinds if not isinstance(each, inspect.NoneType)]
        case inspect.TupleType():
            return [filled(each, name) for each in kind.item_types]
        case inspect.DictType():
            return {"1": filled(kind.value_type, name)}
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return NUMBERS.get(name, 7)
        case inspect.FloatType():
            return 2.5
        case inspect.BytesType():
            return b"bytes"
        case inspect.StrType():
            return TEXTS.get(name, name or "text")
        case _:
            raise TypeError(f"{name}: {kind}")
