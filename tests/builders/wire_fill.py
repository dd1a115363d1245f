"""A value of a type of the wire with every field filled, so that nothing of it is left off; and what a type
promises to the other end."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

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
            return 1 if name == "version" else 7
        case inspect.FloatType():
            return 2.5
        case inspect.BytesType():
            return "Ynl0ZXM="
        case inspect.StrType():
            return TEXTS.get(name, name or "text")
        case _:
            raise TypeError(f"{name}: {kind}")


def promise(kind: type) -> dict[str, Any]:
    """Of each structure of a message: its fields in their order, with whether they have to be there; of each
    enumeration its words."""
    found: dict[str, Any] = {}
    for name, schema in sorted(msgspec.json.schema(kind)["$defs"].items()):
        if "enum" in schema:
            found[name] = sorted(schema["enum"])
        elif "prefixItems" in schema:
            found[name] = {"items": len(schema["prefixItems"]), "needed": schema.get("minItems", 0)}
        else:
            kinds = {key: kinds_of(value) for key, value in schema["properties"].items()}
            found[name] = {"fields": kinds, "required": sorted(schema.get("required", []))}
    return found


def kinds_of(schema: dict[str, Any]) -> list[str]:
    """What JSON may stand in a field: `integer`, `null`, the name of a structure."""
    parts = schema.get("anyOf", [schema])
    return sorted(
        str(each.get("type") or each.get("$ref", "").rpartition("/")[2] or each.get("enum")) for each in parts
    )


if __name__ == "__main__":
    import json
    import sys

    from slurm_watchdog.model.protocol import Reply
    from slurm_watchdog.model.report import Report

    for message in (Report, Reply):
        document = {"promise": promise(message), "message": filled(inspect.type_info(message))}
        with open(f"{sys.argv[1]}/{message.__name__.lower()}.json", "w") as file:
            json.dump(document, file, indent=1, sort_keys=True)
            file.write("\n")
