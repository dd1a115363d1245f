"""Remembers what a pure function gave for a value, for as long as that value lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")
R = TypeVar("R")


class ByIdentity(Generic[V, R]):
    """Results of a pure function of a large immutable value, kept until the value is freed.

    An `lru_cache` would hash the whole value at each call, and keep it alive after its job is gone. `V` is a type
    that can be weakly referenced: a Struct with `weakref=True`.
    """

    def __init__(self, function: Callable[[V], R]) -> None:
        self._function = function
        self._known: dict[int, tuple[weakref.ref[V], R]] = {}

    def __call__(self, value: V) -> R:
        number = id(value)
        known = self._known.get(number)
        if known is not None and known[0]() is value:
            return known[1]
        result = self._function(value)
        self._known[number] = (weakref.ref(value, lambda gone: self._forget(number, gone)), result)
        return result

    def _forget(self, number: int, gone: weakref.ref[V]) -> None:
        known = self._known.get(number)
        if known is not None and known[0] is gone:
            del self._known[number]

    def __len__(self) -> int:
        return len(self._known)
