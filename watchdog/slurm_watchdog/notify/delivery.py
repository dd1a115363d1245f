"""Sends what waits in the outbox, one worker a channel, with growing pauses after failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.text import one_line
from slurm_watchdog.model.documents import Delivery
from slurm_watchdog.notify.http import SendFailed
from slurm_watchdog.notify.notification import Topic

if TYPE_CHECKING:
    from slurm_watchdog.journal.outbox import OutboxItem, SqlOutbox

LOG = logging.getLogger(__name__)
Count = Callable[[str, str, int], None]
Post = Callable[["Sequence[OutboxItem]"], Awaitable[None]]

POLL_S = 5.0
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 600.0
LONGEST_WAIT_S = 3600.0
"""Even if Slack asks for more."""
STALE_AFTER_S = 86400.0
"""Older messages are dropped; they are in the log and in the journal."""
FORGET_AFTER_S = 14 * 86400.0
"""Threads and sent messages are remembered so long: an incident that lasts longer gets a new thread."""
TIDY_EVERY_S = 600.0


class Channel(Protocol):
    """A notification backend: Slack, a webhook, Alertmanager."""

    name: str
    """In the outbox; at most 32 characters."""
    topics: frozenset[Topic]
    """The topics that it sends."""

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """Send what is due of the oldest rows, within a deadline of its own, and mark them as done.

        Returns after how many seconds to call again; None if there is nothing to do. Raises SendFailed with
        what comes first still to be done, and JournalError. `now` is a date.
        """
        ...


async def send_together(
    outbox: SqlOutbox,
    channel: str,
    items: Sequence[OutboxItem],
    post: Callable[[Sequence[OutboxItem]], Awaitable[None]],
) -> None:
    """Posts rows in one request and marks them as done; where that is refused for good, the first alone, so that only
    what is refused is dropped. Raises SendFailed."""
    try:
        await post(items)
    except SendFailed as error:
        if not error.permanent or len(items) == 1:
            raise
        items = items[:1]
        await post(items)
    outbox.done_all(channel, [item.id for item in items])


class ChannelWorker:
    """Sends the outbox rows of one channel."""

    def __init__(self, outbox: SqlOutbox, channel: Channel, poll_s: float, wall: Callable[[], float]) -> None:
        self.channel = channel
        self._outbox = outbox
        self._poll_s = poll_s
        self._wall = wall
        self._added = asyncio.Event()
        self.count: Count = lambda channel, outcome, number: None
        self._failing_since: float | None = None
        self._error = ""
        self._repeat_failed = False
        """The last failure was a repeat of firing alerts, not a row: the next call without a failure clears it."""
        self._backlog: tuple[int, float | None] = (0, None)

    def delivery(self) -> Delivery:
        """How this channel's messages fare."""
        now = self._wall()
        waiting, oldest_at = self._backlog
        return Delivery(
            channel=self.channel.name,
            failing_s=None if self._failing_since is None else max(0.0, now - self._failing_since),
            error=one_line(self._error, 200),
            waiting=waiting,
            oldest_s=0.0 if oldest_at is None else max(0.0, now - oldest_at),
        )

    def wake(self) -> None:
        """A row was added."""
        self._added.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self._added.clear()
            try:
                wait_s = await self.send_next()
                self._backlog = self._outbox.backlog(self.channel.name)
            except Exception:  # the boundary: an outbox that fails is tried again
                LOG.exception("the outbox of %s can't be worked off", self.channel.name)
                wait_s = None
            if wait_s is not None:
                await asyncio.sleep(min(wait_s, self._poll_s))
                continue
            try:
                async with timeout(self._poll_s):
                    await self._added.wait()
            except TimeoutError:
                pass

    async def send_next(self) -> float | None:
        """One turn of the channel; returns after how many seconds the next is due, None if it waits for news.

        A message that fails delays those behind it: they are sent in order.
        """
        name, now = self.channel.name, self._wall()
        first = self._outbox.pending(1, name)
        if first and now - first[0].added_at > STALE_AFTER_S:
            dropped = self._outbox.expire(name, now - STALE_AFTER_S)
            self.count(name, "dropped", dropped)
            LOG.error("%d messages to %s are dropped: a day old, last failure: %s", dropped, name, first[0].error)
            return 0.0
        # A clock that was set back must not keep a message for longer than any retry takes.
        if first and now < first[0].retry_at <= now + LONGEST_WAIT_S:
            return first[0].retry_at - now
        try:
            wait_s = await self.channel.send_due(self._outbox, now)
        except SendFailed as error:
            self._failing_since = now if self._failing_since is None else self._failing_since
            self._error, self._repeat_failed = error.reason, not first
            return self._failed(error)
        left = self._outbox.pending(1, name) if first else []
        if first and (not left or left[0].id != first[0].id):
            self.count(name, "sent", 1)
            self._failing_since = None
        elif not first and self._repeat_failed:
            self._failing_since = None
        return wait_s

    def _failed(self, error: SendFailed) -> float:
        """Writes a failure down at the row that comes first; returns the pause until the next try."""
        name = self.channel.name
        pending = self._outbox.pending(1, name)
        self.count(name, "dropped" if pending and error.permanent else "failed", 1)
        if not pending:
            LOG.warning("%s: %s", name, error.reason)
            return min(LONGEST_WAIT_S, error.retry_after_s or 10 * FIRST_RETRY_S)
        item = pending[0]
        if error.permanent:
            LOG.error("message %d to %s about %s is dropped: %s", item.id, name, item.incident_id, error.reason)
            self._outbox.done_all(name, (item.id,))
            return 0.0
        backoff = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(item.attempts, 20))
        wait_s = backoff if error.retry_after_s is None else min(error.retry_after_s, LONGEST_WAIT_S)
        LOG.warning(
            "message %d to %s about %s waits %.0f s: %s",
            item.id,
            name,
            item.incident_id,
            wait_s,
            error.reason,
        )
        self._outbox.failed(item.id, error.reason, self._wall() + wait_s)
        return wait_s
