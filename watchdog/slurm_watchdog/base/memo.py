"""What pure functions said of a value: they are not asked again while it lives, and what they said goes with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Series(tuple[T, ...]):
    """A tuple in whose dictionary `by_identity` keeps answers. The state hands out the same one until it grows."""


def by_identity(function: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """`function`, which has to be pure, remembering its newest answer about each value that has a dictionary (a Series,
    a Struct with `dict=True`); about any other, as a plain tuple, it is asked each time.

    To hash or compare six hundred values for every job at every look is what this saves. A table of answers on the side
    would keep thousands of series that have grown since.
    """

    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def remembered(value: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answers: dict[Any, tuple[object, R]] | None = getattr(value, "__dict__", None)
        if answers is None:
            return function(value, *args, **kwargs)
        rest = (args, tuple(sorted(kwargs.items())))
        found = answers.get(key)
        if found is None or found[0] != rest:
            found = answers[key] = (rest, function(value, *args, **kwargs))
        return found[1]

    return remembered
