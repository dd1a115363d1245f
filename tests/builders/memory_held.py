"""How much memory a value holds."""

from __future__ import annotations

from typing import Any


def held(value: Any, seen: set[int]) -> int:
    """How many entries all containers below `value` have, each container counted once."""
    if id(value) in seen or isinstance(value, str | int | float | bytes | type(None)):
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return len(value) + sum(held(each, seen) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        return len(value) + sum(held(each, seen) for each in value)
    names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
    return sum(held(getattr(value, name, None), seen) for name in names if name not in ("config", "_new_id"))
