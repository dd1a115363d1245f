"""What pure functions said of a series: they are not asked again until the series is another one, and what they said
goes with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Series(tuple[T, ...]):
    """A tuple in whose dictionary `by_identity` keeps answers. The state hands out the same one until it grows."""


def by_identity(
    function: Callable[Concatenate[tuple[T, ...], P], R],
) -> Callable[Concatenate[tuple[T, ...], P], R]:
    """`function`, which has to be pure, remembering its newest answer about each Series; about any other tuple it is
    asked each time.

    To hash or compare six hundred values for every job at every look is what this saves. A table of answers on the side
    would keep thousands of series that have grown since.
    """

    @wraps(function)
    def remembered(values: tuple[T, ...], /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(values, Series):
            return function(values, *args, **kwargs)
        answers: dict[Any, tuple[object, R]] = values.__dict__
        rest = (args, tuple(sorted(kwargs.items())))
        found = answers.get(function)
        if found is None or found[0] != rest:
            found = answers[function] = (rest, function(values, *args, **kwargs))
        return found[1]

    return remembered
