"""Makes bodies: reports that keep to the schema and say absurd things, reports that nearly keep to it, and
what is none at all.

What keeps to the schema is drawn from the types of Report itself, so that a field that is added is drawn as well.
"""

from __future__ import annotations

import gzip
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import inspect

from slurm_watchdog.model.report import Report

NUMBERS: Final = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-308,
    5e-324,
    1e9,
    -1e9,
    1e18,
    1e300,
    -1e300,
    1.7976931348623157e308,
    30.0,
    3600.0,
)
INTEGERS: Final = (
    0,
    1,
    2,
    3,
    7,
    -1,
    100,
    4711,
    2**31,
    2**32,
    -(2**31),
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    10**6,
)
TEXTS: Final = (
    "", "7", "8", "7.0", "n1", "n2", "n9", "/shared/log.txt", "/shared", "write", "0", "a", "R", "D", "GPU-0", "0000:01:00.0",
    "\x00", "\x1b[31mred", "\u202e", "\U0001f4a9", "é" * 50, "../" * 40, "x" * 5000, "%s%n", "{job_id}", "'; DROP TABLE", "nan", "-1",
    "slurm-watchdog", "Traceback (most recent call last):", "RuntimeError: CUDA error", "NVRM: Xid (PCI:0000:01:00): 79",
)  # fmt: skip
NAMED: Final[dict[str, tuple[str, ...]]] = {
    "node": ("n1", "n2", "n3"),
    "job_id": ("7", "7", "8", "9", ""),
    "boot_id": ("b", "b", "c"),
    "agent_id": ("a", "a", "b"),
    "path": ("/shared/log.txt", "/shared/ckpt", ""),
    "mount": ("/shared", "/", ""),
}
"""Fields whose values have to fit something that the controller knows, most of the time."""
RAW: Final = (
    b"\xc1", b"\xc0", b"\xc3", b"\xa0", b"\x90", b"\x80", b"\xc4\x01\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xd9\x02\xff\xfe",
    b"\xa3\xed\xa0\x80", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xcb\x7f\xf8" + b"\x00" * 6, b"\xcb\x7f\xf0" + b"\x00" * 6,
    b"\xcb\xff\xf0" + b"\x00" * 6, b"\xca\x7f\xc0\x00\x00", b"\xdf" + b"\xff" * 4, b"\xdd" + b"\xff" * 4, b"\xdb" + b"\xff" * 4,
    b"\xc6" + b"\xff" * 4, b"\x91" * 3000, b"\x91" * 100_000, b"\x81\xa1a" * 3000, b"\xda\xff\xff" + b"A" * 65_535,
)  # fmt: skip
"""Put in place of a value, where MessagePack's own writer would not."""

BOMB: Final = gzip.compress(b"\x00" * (64 << 20), 9)
"""64 KiB that would be 64 MiB, if anybody were to unpack it."""


POOL: Final = 300


class Bodies:
    """An endless row of bodies; the same for the same seed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.sequence = 0
        self._pool: deque[dict[str, Any]] = deque(maxlen=POOL)
        self._kinds: tuple[tuple[str, int, Callable[[], bytes]], ...] = (
            ("valid", 30, self.valid),
            ("nearly", 30, self.nearly),
            ("raw", 15, self.raw),
            ("cut", 8, self.cut),
            ("flipped", 8, self.flipped),
            ("spliced", 5, self.spliced),
            ("random", 3, self.random),
            ("bomb", 1, lambda: BOMB),
        )
        self._weights = [weight for _, weight, _ in self._kinds]

    def next(self) -> tuple[str, bytes]:
        """(kind, body)."""
        name, _, make = self.rng.choices(self._kinds, self._weights)[0]
        return name, make()

    def valid(self) -> bytes:
        """Keeps to the schema."""
        return msgspec.msgpack.encode(self._drawn() | self._head())

    def _head(self) -> dict[str, Any]:
        """What every report has, of a node that the controller knows."""
        self.sequence += self.rng.choice((1, 1, 1, 1, 0, 100))
        node, age_s = self.rng.choice(NAMED["node"]), self.rng.choice((0.0, 0.0, 0.0, 40.0, -5.0, 1e300))
        return {"node": node, "version": 1, "sequence": self.sequence, "age_s": age_s}

    def _drawn(self) -> dict[str, Any]:
        """All the rest, with anything in it that the types allow. Drawing is slow: most have been drawn before."""
        if len(self._pool) < POOL or self.rng.random() < 1 / 8:
            self._pool.append(self._draw(_REPORT, "", 0))
        return self.rng.choice(self._pool)

    def report(self) -> dict[str, Any]:
        """A report as builtins."""
        made: dict[str, Any] = msgspec.msgpack.decode(self.valid())
        return made

    def nearly(self) -> bytes:
        """Keeps to the schema but for a few places."""
        report = self.report()
        for times in range(self.rng.choice((1, 1, 2, 5))):
            self._spoil(report, longer=2 if times else 300)
        return msgspec.msgpack.encode(report)

    def raw(self) -> bytes:
        """Has something in it that is not MessagePack, or that its readers stumble over, in place of a text."""
        body = self.valid()
        at = body.find(b"\xa1", self.rng.randrange(len(body)))
        return body[:at] + self.rng.choice(RAW) + body[at + 2 :]

    def cut(self) -> bytes:
        body = self.valid()
        return body[: self.rng.randrange(len(body))]

    def flipped(self) -> bytes:
        body = bytearray(self.valid())
        for _ in range(self.rng.choice((1, 1, 3, 30))):
            body[self.rng.randrange(len(body))] = self.rng.randrange(256)
        return bytes(body)

    def spliced(self) -> bytes:
        """Parts of two reports, one after the other."""
        one, other = self.valid(), self.valid()
        return one[: self.rng.randrange(len(one))] + other[self.rng.randrange(len(other)) :]

    def random(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 10, 100, 10_000)))

    # -- drawing -----------------------------------------------------------------------------------------------

    def _draw(self, kind: inspect.Type, name: str, depth: int) -> Any:
        rng = self.rng
        match kind:
            case inspect.StructType():
                found = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
                for field in kind.fields:
                    if field.required or kind.array_like or rng.random() < 0.5:
                        found[field.encode_name] = self._draw(field.type, field.encode_name, depth + 1)
                return list(found.values()) if kind.array_like else found
            case inspect.UnionType():
                return self._draw(rng.choice(kind.types), name, depth)
            case inspect.ListType() | inspect.VarTupleType():
                most = (0, 1, 1, 2, 3, 8)[: max(2, 6 - depth)]
                return [self._draw(kind.item_type, name, depth + 1) for _ in range(rng.choice(most))]
            case inspect.TupleType():
                return [self._draw(each, name, depth + 1) for each in kind.item_types]
            case inspect.DictType():
                return {
                    self._text(name): self._draw(kind.value_type, name, depth + 1) for _ in range(rng.choice((0, 1, 3)))
                }
            case inspect.EnumType():
                return rng.choice([each.value for each in kind.cls])
            case inspect.LiteralType():
                return rng.choice(list(kind.values))
            case inspect.StrType():
                return self._text(name)
            case inspect.BytesType():
                return rng.randbytes(8)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.IntType():
                return rng.choice(INTEGERS[:14]) if rng.random() < 0.5 else rng.randrange(64)
            case inspect.FloatType():
                return rng.choice(NUMBERS) if rng.random() < 0.5 else rng.random() * 100
            case inspect.NoneType():
                return None
            case _:
                return None

    def _text(self, name: str) -> str:
        if name in NAMED and self.rng.random() < 0.8:
            return self.rng.choice(NAMED[name])
        return self.rng.choice(TEXTS)

    def _spoil(self, value: Any, longer: int) -> None:
        """Changes one thing somewhere below; a list may become so many times as long."""
        rng = self.rng
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = rng.choice(keys)
            inner = value[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
                value = inner
                continue
            what = rng.randrange(4)
            if what == 0 and isinstance(value, dict):
                del value[key]
            elif what == 1 and isinstance(value, dict):
                value[rng.choice(TEXTS)] = inner
            elif what == 2 and isinstance(inner, list):
                value[key] = inner * rng.choice((2, longer))
            else:
                value[key] = rng.choice(
                    (
                        None,
                        True,
                        [],
                        {},
                        "x",
                        -1,
                        1.5,
                        rng.choice(INTEGERS),
                        rng.choice(NUMBERS),
                        [[[]]],
                        {"a": {"b": []}},
                    )
                )
            return


_REPORT = inspect.type_info(Report)
