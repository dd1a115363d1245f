"""What `make test` leaves to `make test-all`: all but the first of a row of stories, seeds or blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values of one parameter: the first `count` are always run, the others are thorough."""
    return [
        value if place < count else pytest.param(value, marks=pytest.mark.thorough)
        for place, value in enumerate(values)
    ]
