"""What a pure function said of a series before: it is not asked again until the series is another one."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

MAX_VALUES: Final = 500_000
"""In all series that one function remembers, 8 bytes each: several hundred long ones. A job's series is another one
with each step, and the older ones are never asked about again."""
OF_ANSWER: Final = 5
"""Values that each part of an answer with many parts, such as one for each rank, counts for."""


def by_identity(
    function: Callable[Concatenate[tuple[T, ...], P], R],
) -> Callable[Concatenate[tuple[T, ...], P], R]:
    """`function`, which has to be pure, remembering its answers for the newest tuples, of MAX_VALUES in all, each with
    one set of further arguments.

    The state hands out the same tuple until it grows. To compare identities is exact, for a tuple that is
    remembered cannot change and its id cannot be given to another; to hash or compare six hundred values for
    every job at every look is what this saves.
    """
    known: dict[int, tuple[tuple[T, ...], object, R]] = {}
    held = 0

    @wraps(function)
    def remembered(values: tuple[T, ...], /, *args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal held
        rest = (args, tuple(sorted(kwargs.items())))
        found = known.get(id(values))
        if found is not None and found[0] is values and found[1] == rest:
            return found[2]
        answer = function(values, *args, **kwargs)
        if found is not None:
            held -= _weight(*known.pop(id(values)))
        known[id(values)] = (values, rest, answer)
        held += _weight(values, rest, answer)
        while held > MAX_VALUES and len(known) > 1:
            held -= _weight(*known.pop(next(iter(known))))
        return answer

    return remembered


def _weight(values: tuple[object, ...], _: object, answer: object) -> int:
    return 1 + len(values) + (OF_ANSWER * len(answer) if isinstance(answer, Sized) else 0)
