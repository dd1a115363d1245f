"""Once a week, what the jobs did with their nodes: put up for Slack, once also if the controller starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from slurm_watchdog.base import clock
from slurm_watchdog.base.hours import newest_start
from slurm_watchdog.controller.api.report_view import read
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.notify.weekly_message import weekly_message

WEEK_S = 7 * 86400.0
LATE_S = 86400.0
"""A controller that was away at the time makes up for it so long afterwards; the outbox remembers for longer."""


class WeeklyReport:
    """`when` is a time of the week; empty: never. In the outbox the message goes by its date: there is one of each."""

    def __init__(
        self, when: str, url: str, notifier: Notifier, cluster: str, wall: Callable[[], float] = clock.wall
    ) -> None:
        self.when, self._url, self._notifier, self._cluster, self._wall = when, url, notifier, cluster, wall

    async def turn(self) -> bool:
        """Whether one was due and is put up. Raises JournalError."""
        now = self._wall()
        at = newest_start(self.when, now)
        name = f"weekly {datetime.fromtimestamp(at, tz=UTC).astimezone():%Y-%m-%d}"
        if now - at > LATE_S or not self._notifier.takes(name):
            return False
        found, _ = await asyncio.to_thread(read, self._url, at - WEEK_S, at)
        self._notifier.announce(name, weekly_message(found, self._cluster))
        return True
