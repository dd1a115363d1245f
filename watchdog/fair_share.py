"""Which rows of a list are kept where there are too many: each owner gets the same share, and what few want they get whole. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def fair_share(
    rows: Sequence[T], limit: int, owner: Callable[[T], Hashable], order: Callable[[T], Any] | None = None
) -> tuple[tuple[T, ...], Counter[Hashable]]:
    """At most `limit` of `rows`, in their order, and how many were left out of each owner's.

    The owners take turns, one row each, until the limit is reached: 50,000 rows of one user cost another user none of his few.
    Within an owner's rows those that are lowest by `order` come first, else those that stand first.
    """
    if len(rows) <= limit:
        return tuple(rows), Counter()
    places = range(len(rows))
    turns: list[tuple[int, int]] = []
    taken: Counter[Hashable] = Counter()
    for place in places if order is None else sorted(places, key=lambda at: order(rows[at])):
        who = owner(rows[place])
        turns.append((taken[who], place))
        taken[who] += 1
    turns.sort()
    left_out = Counter(owner(rows[place]) for _, place in turns[limit:])
    return tuple(rows[place] for place in sorted(place for _, place in turns[:limit])), left_out
