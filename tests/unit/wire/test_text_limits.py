"""No text of a report is longer than its field may be, whatever field of whatever row: they are derived from
the types of the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import ELLIPSIS, MAX_LENGTHS, MAX_NAME, UNCUT_FIELDS, decode_report, may_have_long_text
from tests.builders.wire_fill import filled

LONG = 10_000


def texts(kind: inspect.Type, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where a report has free text."""
    match kind:
        case inspect.StrType():
            return [path]
        case inspect.StructType():
            return [each for field in kind.fields for each in texts(field.type, (*path, field.name))]
        case inspect.UnionType():
            return [found for each in kind.types for found in texts(each, path)]
        case inspect.CollectionType():
            return texts(kind.item_type, path)
        case inspect.TupleType():
            return [found for each in kind.item_types for found in texts(each, path)]
        case _:
            return []


PATHS = sorted({path for path in texts(inspect.type_info(Report)) if path[0] not in UNCUT_FIELDS})


def swollen(kind: inspect.Type, value: Any, path: tuple[str, ...], text: str) -> Any:
    """Plain data (`filled`) with `text` at one path, in all rows there."""
    match kind:
        case inspect.UnionType():
            return swollen(next(each for each in kind.types if each != inspect.NoneType()), value, path, text)
        case inspect.StructType():
            inner = [each.type for each in kind.fields if each.name == path[0]]
            if kind.array_like:
                pairs = zip(kind.fields, value, strict=True)
                return [swollen(one.type, each, path[1:], text) if one.name == path[0] else each for one, each in pairs]
            return {**value, path[0]: swollen(inner[0], value[path[0]], path[1:], text)} if inner else value
        case inspect.CollectionType():
            kinds = kind.item_type.types if isinstance(kind.item_type, inspect.UnionType) else (kind.item_type,)
            return [swollen(one, each, path, text) for one, each in zip(kinds, value, strict=False)]
        case inspect.TupleType():
            return [swollen(one, each, path, text) for one, each in zip(kind.item_types, value, strict=True)]
        case _:
            return text if isinstance(value, str) else value


def longest(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return max(map(longest, inner), default=0)


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_long_text_of_a_report_is_cut_and_says_so(path: tuple[str, ...]) -> None:
    text = ('\\"', "é\n\x01", "x")[PATHS.index(path) % 3] * LONG
    plain = filled(inspect.type_info(Report))
    data = msgspec.msgpack.encode(swollen(inspect.type_info(Report), plain, path, text))
    assert len(data) > LONG
    taken = msgspec.to_builtins(decode_report(data))
    limit = MAX_LENGTHS.get(path[-1], MAX_NAME)
    assert longest(taken) == limit
    assert ELLIPSIS in msgspec.json.encode(taken).decode()


def test_an_honest_report_is_taken_as_it_is() -> None:
    data = msgspec.msgpack.encode(filled(inspect.type_info(Report)))
    assert not may_have_long_text(data)
    assert decode_report(data) == msgspec.msgpack.decode(data, type=Report)


def test_numbers_and_many_short_texts_are_no_long_text() -> None:
    data = msgspec.msgpack.encode({"node": "n1", "numbers": list(range(MAX_NAME)), "states": ["S" * 250] * 9})
    assert len(data) > 3 * MAX_NAME
    assert not may_have_long_text(data)


@pytest.mark.parametrize("size", [MAX_NAME + 1, 1000, 65_535, 65_536, 10**6])
def test_a_long_text_is_found_whatever_stands_beside_it(size: int) -> None:
    assert may_have_long_text(msgspec.msgpack.encode({"a": 0.1, "b": "x" * size, "c": "é\xda\x01"}))
    assert may_have_long_text(b"\x81\xa1b\xdb" + size.to_bytes(4, "big") + b"x" * size), "in the longest form"
