"""Once a week, what the jobs did with their nodes: put up for every channel that wants it, once also if the controller
starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timezone

from slurm_watchdog.base import clock
from slurm_watchdog.base.hours import days_before, newest_start
from slurm_watchdog.controller.api.report_view import read
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.notify.weekly_message import weekly_row, weekly_words

WEEK = 7
LATE_S = 86400.0
"""A controller that was away at the time makes up for it so long afterwards; the outbox remembers for longer."""


class WeeklyReport:
    """In the outbox a report goes by its date: there is one of each for a channel."""

    def __init__(self, url: str, notifier: Notifier, cluster: str, wall: Callable[[], float] = clock.wall) -> None:
        self._url, self._notifier, self._cluster, self._wall = url, notifier, cluster, wall

    async def turn(self) -> bool:
        """Whether one was due and is put up. Raises JournalError."""
        now, sent = self._wall(), False
        for channel, wanted in self._notifier.weekly.items():
            at = newest_start(wanted.when, now)
            name = f"weekly {datetime.fromtimestamp(at, tz=timezone.utc).astimezone():%Y-%m-%d}"
            if now - at > LATE_S or self._notifier.has(channel, name):
                continue
            found, _ = await asyncio.to_thread(read, self._url, days_before(at, WEEK), at, wanted.about)
            row = weekly_row(weekly_words(found, wanted.about), self._cluster)
            self._notifier.put_up(channel, name, row)
            sent = True
        return sent
