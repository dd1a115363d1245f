"""Whose turn it is: which jobs a tick looks at, where they are too many to look at all of them each second. Pure.

What a tick may cost is bounded by the number of processes it walks over, so that reports are taken while it
judges. Below that number
everything is looked at in every tick. Above it half of a tick is for jobs about which there is news or
trouble, and all that is left
for those that were not looked at for longest: nobody waits long, however much trouble there is.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.base.structs import Struct

PROCESSES_A_TICK = 15_000
"""75 jobs of 200 ranks. Measured: a tick of 10,000 nodes takes about 0.25 s of a core with them, and a turn
of 80,000 ranks 6 s."""


class ScheduledJob(Struct, frozen=True, kw_only=True):
    """One job that waits to be looked at."""

    job_id: str
    size: int
    """Processes to walk over."""
    restless: bool
    """Something has happened, or is wrong, since the last look."""
    looked_at: float
    """-inf: never."""


def choose(waiting: Iterable[ScheduledJob], most: int = PROCESSES_A_TICK) -> frozenset[str]:
    """The jobs to look at now; at least one of each half, whatever its size."""
    turns = sorted(waiting, key=lambda turn: (turn.looked_at, turn.job_id))
    if sum(turn.size for turn in turns) <= most:
        return frozenset(turn.job_id for turn in turns)
    chosen: set[str] = set()
    left = _take((turn for turn in turns if turn.restless), most // 2, chosen)
    _take((turn for turn in turns if turn.job_id not in chosen), most - most // 2 + left, chosen)
    return frozenset(chosen)


def _take(turns: Iterable[ScheduledJob], most: int, chosen: set[str]) -> int:
    """Adds to `chosen` until `most` processes are reached. Returns what is left of them."""
    for number, turn in enumerate(turns):
        if number and turn.size > most:
            break
        chosen.add(turn.job_id)
        most -= turn.size
    return max(0, most)
