"""How much of a core the controller's event loop takes: where it has a whole one, reports wait in their connections,
and nothing else shows it: their age is counted from when they were sent."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 60.0
"""A start of all agents, or of a thousand jobs, is over by then."""
FULL: Final = 0.95
"""With 10,000 agents over TLS at 5 s a core was full, and decisions were late by seconds; at 10 s, with 0.68 of one,
they were not (docs/evaluation.md)."""


class BusyShare:
    """One event loop owns it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def note(self, now: float, cpu_s: float) -> None:
        """`cpu_s`: processor time of the loop's thread so far."""
        self._seen.append((now, cpu_s))
        while len(self._seen) > 1 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    def share(self) -> float | None:
        """Of a core, over the last WINDOW_S; None: it was not watched for so long yet."""
        if not self._seen or self._seen[-1][0] - self._seen[0][0] < WINDOW_S:
            return None
        (began, before_s), (ended, after_s) = self._seen[0], self._seen[-1]
        return (after_s - before_s) / (ended - began)
