"""Numbers that grow as time passes, and that notice at which moment a comparison with them comes out differently.

A conclusion from them holds until then: a job of which nothing new has come is not judged again before.
Comparisons, sums and differences are followed; a text that shows one holds for SHOWN_S; anything else that is done with
one (to round it, to multiply it) holds for no time at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

SHOWN_S = 5.0  # Ages that people read are at most so old: as often as an agent reports.


class Clock:
    """Of one judgement: for how long it holds."""

    __slots__ = ("holds_s", "is_shown")

    def __init__(self) -> None:
        self.holds_s = math.inf
        self.is_shown = False  # A text shows an age of it.


class Ticking(float):
    """A number as it is now, which grows by `slope` each second."""

    __slots__ = ("clock", "slope")
    clock: Clock
    slope: float

    def meets(self, other: Any) -> None:
        """Notes when it will be as large as the other one, if that is to come."""
        rate, ahead = self.slope - getattr(other, "slope", 0.0), float.__sub__(self, other)
        if rate and ahead is not NotImplemented and 0.0 <= -ahead / rate < self.clock.holds_s:
            self.clock.holds_s = -ahead / rate

    def __bool__(self) -> bool:
        self.meets(0.0)
        return float.__bool__(self)

    def __add__(self, other: float) -> float:
        return _made(float.__add__(self, other), self.slope + getattr(other, "slope", 0.0), self.clock)

    def __radd__(self, other: float) -> float:
        return self + other

    def __sub__(self, other: float) -> float:
        return _made(float.__sub__(self, other), self.slope - getattr(other, "slope", 0.0), self.clock)

    def __rsub__(self, other: float) -> float:
        return _made(float.__rsub__(self, other), -self.slope, self.clock)


def ticking(now: float, clock: Clock) -> float:
    """`now`, from which ages come that `clock` follows."""
    return _made(now, 1.0, clock)


def shown(value: float) -> float:
    """The number to be shown to people: see SHOWN_S."""
    if type(value) is Ticking:
        value.clock.is_shown = True
    return plain(value)


def plain(value: float) -> float:
    """The same number, which does not notice anything."""
    return float.__add__(value, 0.0) if type(value) is Ticking else value


def _made(value: float, slope: float, clock: Clock) -> float:
    if value is NotImplemented or not slope:
        return value
    made = float.__new__(Ticking, value)
    made.clock, made.slope = clock, slope
    return made


def _followed(of_float: Callable[..., Any]) -> Any:
    def compare(self: Ticking, other: object) -> Any:
        self.meets(other)
        return of_float(self, other)

    return compare


def _unfollowed(of_float: Callable[..., Any]) -> Any:
    def use(self: Ticking, *args: object) -> Any:
        self.clock.holds_s = 0.0
        return of_float(self, *args)

    return use


def _shown(of_float: Callable[..., Any]) -> Any:
    return lambda self, *args: of_float(shown(self), *args)


COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
TEXTS = ("__format__", "__repr__")
for _name, _of_float in vars(float).items():
    if _name in COMPARISONS:
        setattr(Ticking, _name, _followed(_of_float))
    elif _name in TEXTS:
        setattr(Ticking, _name, _shown(_of_float))
    elif callable(_of_float) and _name not in {*vars(Ticking), "__new__", "__getattribute__"}:
        setattr(Ticking, _name, _unfollowed(_of_float))
