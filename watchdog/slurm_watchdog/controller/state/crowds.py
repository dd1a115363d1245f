"""Whose processes are too many to be looked at one by one: said in the log once for each node, user and job,
and shown as a metric."""

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
LOG_AGAIN_AFTER_S: Final = 86_400.0
MAX_LOGGED: Final = 1024


@dataclass
class Crowds:
    """Remembers which crowds were logged."""

    _logged_at: dict[tuple[str, int, str | None], float] = field(default_factory=dict)

    def update(self, shortages: Iterable[Shortage], now: float) -> Mapping[tuple[str, int], int]:
        """(job, user) -> processes without room, the largest MAX_CROWDS; logs those that are new."""
        found: Counter[tuple[str, int]] = Counter()
        for each in shortages:
            if each.what != "processes" or each.uid is None or each.age_s > FRESH_S:
                continue
            self._log_once(each, each.uid, now)
            if each.job_id is not None:
                found[each.job_id, each.uid] += each.count
        return dict(found.most_common(MAX_CROWDS))

    def _log_once(self, crowd: Shortage, uid: int, now: float) -> None:
        whose = (crowd.whose, uid, crowd.job_id)
        if now - self._logged_at.get(whose, float("-inf")) < LOG_AGAIN_AFTER_S:
            return
        if len(self._logged_at) >= MAX_LOGGED:
            self._logged_at = {key: at for key, at in self._logged_at.items() if now - at < LOG_AGAIN_AFTER_S}
        if len(self._logged_at) >= MAX_LOGGED:
            return
        self._logged_at[whose] = now
        job = f"job {crowd.job_id}" if crowd.job_id is not None else "no job that Slurm lists"
        log.warning(
            "%s: %d processes are too many to be looked at one by one; most of them belong to uid %d, %s",
            crowd.whose, crowd.count, uid, job,
        )  # fmt: skip
