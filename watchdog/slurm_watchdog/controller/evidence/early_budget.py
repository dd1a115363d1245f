"""How often a training is looked at because its step was late by its own measure. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from typing import Final

EARLY_DUMPS_AN_HOUR: Final = 24
"""Of one run. A dump stops no rank (py-spy --nonblocking) and costs 17 to 28 ms of CPU a process (17 ms for 41 threads
of 20 to 40 frames), of a rank and at most four of its workers: 0.15 s. 24 of these are 3.6 s in an hour, 0.1 % of the
one core that a rank has at least. A training that breathes so unevenly that this is used up is judged by its limit
alone for the rest of the hour."""
HOUR_S: Final = 3600.0
REMEMBERED: Final = 1024


class EarlyBudget:
    """One loop owns it; a controller that starts begins at zero."""

    def __init__(self) -> None:
        self._spent: dict[str, deque[float]] = {}

    def spend(self, run: str, now: float) -> bool:
        """Counts one early dump of a run; False if it has had those of an hour."""
        spent = self._spent.setdefault(run, deque(maxlen=EARLY_DUMPS_AN_HOUR))
        if len(spent) == EARLY_DUMPS_AN_HOUR and now - spent[0] < HOUR_S:
            return False
        spent.append(now)
        if len(self._spent) > REMEMBERED:
            self._spent = {each: times for each, times in self._spent.items() if now - times[-1] < HOUR_S}
        return True
