"""One figure is one line of JSON on standard output, and nothing else is ever written there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO


@dataclass
class Figures:
    """Writes figures as they come, and remembers whether all bounds held."""

    out: TextIO
    rows: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        doubtful: bool = False,
    ) -> None:
        """One figure; with `at_most` or `at_least` it has a bound, which it keeps or misses.

        A `doubtful` one was measured too roughly to tell: it neither keeps its bound nor misses it, it is not
        shown to hold.
        """
        bound = at_most if at_most is not None else at_least
        ok = None
        if at_most is not None:
            ok = value <= at_most
        elif at_least is not None:
            ok = value >= at_least
        if ok is not None and doubtful:
            ok = None
            self.doubtful.append(name)
        if ok is False:
            self.missed.append(name)
        self.rows[name] = value
        row = {"bench": name, "value": rounded(value), "unit": unit, "bound": bound, "ok": ok}
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()


def rounded(value: float) -> float:
    """Four significant digits: no measurement here knows more, and a reader needs no more."""
    return float(f"{value:.4g}")


def take_standard_output() -> TextIO:
    """The real standard output for figures alone; whatever else writes to it, a child for instance, lands on
    standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def say(text: str) -> None:
    """Progress and prose, for people."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed; of one value, that value. Raises
    ValueError without any."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
