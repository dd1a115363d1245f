"""What a pure function said of a series before: it is not asked again until the series is another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

MAX_REMEMBERED = 2048
"""Series, of all jobs together."""


def by_identity(
    function: Callable[Concatenate[tuple[T, ...], P], R],
) -> Callable[Concatenate[tuple[T, ...], P], R]:
    """`function`, which has to be pure, remembering its answers for the newest KEPT tuples, each with one set of
    further arguments.

    The state hands out the same tuple until it grows. To compare identities is exact, for a tuple that is
    remembered cannot change and its id cannot be given to another; to hash or compare six hundred values for
    every job at every look is what this saves.
    """
    known: dict[int, tuple[tuple[T, ...], object, R]] = {}

    @wraps(function)
    def remembered(values: tuple[T, ...], /, *args: P.args, **kwargs: P.kwargs) -> R:
        rest = (args, tuple(sorted(kwargs.items())))
        found = known.get(id(values))
        if found is not None and found[0] is values and found[1] == rest:
            return found[2]
        answer = function(values, *args, **kwargs)
        known.pop(id(values), None)
        known[id(values)] = (values, rest, answer)
        while len(known) > MAX_REMEMBERED:
            known.pop(next(iter(known)), None)
        return answer

    return remembered
