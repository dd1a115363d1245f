"""The next run of a training that was broken, read from its own log."""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP = re.compile(r"\bstep (\d+)(?:/\d+)? \| loss ")
RESUMED = re.compile(r"\bresumed from \S+ at step (\d+)")


@dataclass(frozen=True)
class Again:
    """The first step of the run after the fault."""

    resumed_at: int
    """Step of the checkpoint."""
    first_step: int
    steps_lost: int
    """Made before, and to be made again."""
    starts: int
    """How often a run began since the fault: more than once, and something restarted twice."""


def next_run(text: str, mark: int) -> Again | None:
    """What a log says about the first run that has begun behind `mark` (characters) and made a step; None: none has.

    What is still printed by the run before belongs to that. A run that finds no checkpoint says nothing of it, and is
    not seen.
    """
    begun = list(RESUMED.finditer(text, mark))
    for number, start in enumerate(begun):
        end = begun[number + 1].start() if number + 1 < len(begun) else len(text)
        step = STEP.search(text, start.end(), end)
        if step is not None:
            made = max((int(each[1]) for each in STEP.finditer(text, 0, begun[0].start())), default=0)
            resumed_at = int(start[1])
            return Again(resumed_at, int(step[1]), max(0, made - resumed_at), len(begun))
    return None
