"""Whose processes are too many to be looked at one by one: said in the log once for each node, user and job,
and told as a metric."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from slurm_watchdog.base.capped import Shortage

log = logging.getLogger(__name__)

MAX_CROWDS: Final = 20
"""Jobs with a series of their own: more of them at once are a cluster's habit, and the counter of all tells that."""
FRESH_S: Final = 60.0
"""What was left out within so long is the present: agents report every few seconds, or, of changes alone,
every minute."""
AGAIN_S: Final = 86_400.0
MAX_SAID: Final = 1024


@dataclass
class Crowds:
    """Remembers of whom was said already."""

    _said: dict[tuple[str, int, str | None], float] = field(default_factory=dict)

    def look(self, shortages: Iterable[Shortage], now: float) -> Mapping[tuple[str, int], int]:
        """(job, user) -> processes without room, the largest MAX_CROWDS; logs those that are new."""
        found: Counter[tuple[str, int]] = Counter()
        for each in shortages:
            if each.what != "processes" or each.uid is None or each.age_s > FRESH_S:
                continue
            self._say(each, each.uid, now)
            if each.job_id is not None:
                found[each.job_id, each.uid] += each.count
        return dict(found.most_common(MAX_CROWDS))

    def _say(self, crowd: Shortage, uid: int, now: float) -> None:
        whose = (crowd.whose, uid, crowd.job_id)
        if now - self._said.get(whose, float("-inf")) < AGAIN_S:
            return
        if len(self._said) >= MAX_SAID:
            self._said = {key: at for key, at in self._said.items() if now - at < AGAIN_S}
        if len(self._said) >= MAX_SAID:
            return
        self._said[whose] = now
        job = f"job {crowd.job_id}" if crowd.job_id is not None else "no job that Slurm lists"
        log.warning(
            "%s: %d processes are too many to be looked at one by one; most of them belong to uid %d, %s",
            crowd.whose, crowd.count, uid, job,
        )  # fmt: skip
