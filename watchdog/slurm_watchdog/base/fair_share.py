"""Chooses the rows of a list that is too long: owners get equal shares, and small shares are kept whole. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def fair_share(
    rows: Sequence[T], limit: int, owner: Callable[[T], Hashable], order: Callable[[T], Any] | None = None
) -> tuple[tuple[T, ...], Counter[Hashable]]:
    """At most `limit` of `rows`, in their order, and how many were left out of each owner's.

    The owners take turns, one row each, until the limit is reached: 50,000 rows of one user cost another user
    none of his few. Within an owner's rows those that are lowest by `order` come first, else those that stand
    first.
    """
    if len(rows) <= limit:
        return tuple(rows), Counter()
    owners = [owner(row) for row in rows]
    counts = Counter(owners)
    left = _shares(counts, limit)
    left_out = counts - left
    places = range(len(rows))
    chosen: list[int] = []
    for place in places if order is None else sorted(places, key=lambda at: order(rows[at])):
        if left[owners[place]]:
            left[owners[place]] -= 1
            chosen.append(place)
    return tuple(rows[place] for place in sorted(chosen)), left_out


def _shares(counts: Counter[Hashable], limit: int) -> Counter[Hashable]:
    """How many rows each owner gets of `limit`, less than there are: equal shares, and what few leave to others."""
    shares: Counter[Hashable] = Counter()
    waiting = len(counts)
    for who, count in sorted(counts.items(), key=lambda each: each[1]):
        shares[who] = min(count, limit // waiting)
        limit -= shares[who]
        waiting -= 1
    return shares
