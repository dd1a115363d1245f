"""The error lines of one run: few enough to be kept, with the first of them, for the cause stands before its
consequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_watchdog.model.observations import Event

KEPT_ERRORS = 60  # Lines: half of them the first ones since the last step, half the last ones.
MAX_PATTERNS = 64
MAX_RANKS = 262_144
"""Ranks that are counted, of all patterns together: an error that every rank of a large job logs in several
lines has room."""


@dataclass
class RunErrors:
    """What was logged, in the order of its coming."""

    lines: list[tuple[str, float, Event]] = field(default_factory=list)  # (node that read it, when, event).
    ranks: dict[str, set[int]] = field(default_factory=dict)  # Pattern -> the ranks that said so since the last step.
    counted: int = 0  # Entries of `ranks`.
    noted: int = 0  # So many lines have come.

    def add(self, node: str, at: float, event: Event, rose_at: float | None) -> bool:
        """One line more; `rose_at` is when a step was last seen to rise: older lines make room first. False:
        its rank is not counted."""
        if rose_at is not None and self.lines and self.lines[-1][1] < rose_at <= at:
            self.ranks.clear()
            self.counted = 0
        pattern = event.pattern or ""
        if event.rank is not None and (pattern in self.ranks or len(self.ranks) < MAX_PATTERNS):
            named = self.ranks.setdefault(pattern, set())
            counts = event.rank in named or self.counted < MAX_RANKS
            self.counted += counts and event.rank not in named
            if counts:
                named.add(event.rank)
        else:
            counts = event.rank is None
        self.noted += 1
        self.lines.append((node, at, event))
        if len(self.lines) > KEPT_ERRORS:
            old = rose_at is not None and self.lines[0][1] < rose_at
            del self.lines[0 if old else KEPT_ERRORS // 2]
        return counts

    def ranks_by_pattern(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(pattern, ranks in order)."""
        return tuple((pattern, tuple(sorted(named))) for pattern, named in self.ranks.items())
