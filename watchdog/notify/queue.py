"""Messages on their way: written to the journal's outbox at once, sent later and in order, whatever Slack does.

Nobody waits for a message. What is in the outbox when the controller ends is sent after its next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from watchdog import clock
from watchdog.model import ActionRun, Decision, Incident
from watchdog.notify import SendFailed, slack

if TYPE_CHECKING:
    from watchdog.config import Config
    from watchdog.controller.journal import OutboxItem

LOG = logging.getLogger(__name__)

CHANNEL = "people"
MIN_GAP_S = 1.0
"""Slack takes about one message a second from a webhook: https://api.slack.com/docs/rate-limits"""
POLL_S = 5.0
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 600.0
LONGEST_WAIT_S = 3600.0
"""Even if Slack asks for more."""
STALE_AFTER_S = 86400.0
"""A message this old is news to nobody; it is in the log and in the journal."""


class Sender(Protocol):
    """Whoever delivers a message."""

    async def send(self, message: dict[str, Any]) -> None:
        """Deliver one message within a deadline of its own. Raises SendFailed."""
        ...


class Outbox(Protocol):
    """The part of the journal that keeps messages."""

    def outbox_add(self, channel: str, incident_id: str, payload: dict[str, Any], at: float) -> None: ...
    def outbox_pending(self, limit: int) -> list[OutboxItem]: ...
    def outbox_done(self, item_id: int) -> None: ...
    def outbox_failed(self, item_id: int, error: str, retry_at: float) -> None: ...


class LogSender:
    """In the place of Slack where none is configured: the sentence goes to the log."""

    async def send(self, message: dict[str, Any]) -> None:
        """Log the first sentence of the message."""
        LOG.warning("message: %s", message.get("text", ""))


class Notifier:
    """Puts messages up and, while `run` is running, sends them: one at a time, in order, `min_gap_s` apart."""

    def __init__(
        self,
        outbox: Outbox,
        sender: Sender,
        cluster: str,
        *,
        min_gap_s: float = MIN_GAP_S,
        poll_s: float = POLL_S,
        first_retry_s: float = FIRST_RETRY_S,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self._outbox = outbox
        self._sender = sender
        self._cluster = cluster
        self._min_gap_s = min_gap_s
        self._poll_s = poll_s
        self._first_retry_s = first_retry_s
        self._wall = wall
        self._added = asyncio.Event()

    # -- for the controller: each returns at once; raises what the outbox raises (JournalError)

    def opened(self, incident: Incident) -> None:
        """Announce an incident, unless another explains it."""
        if incident.inhibited_by is None:
            self._add(incident, slack.format_opened(incident, self._cluster))

    def decided(self, incident: Incident, decision: Decision) -> None:
        """Announce what was decided."""
        self._add(incident, slack.format_decision(incident, decision, self._cluster))

    def ended(self, incident: Incident, run: ActionRun) -> None:
        """Announce how an action ended."""
        self._add(incident, slack.format_outcome(incident, run, self._cluster))

    def resolved(self, incident: Incident) -> None:
        """Announce that an incident is over, if it was announced that it began."""
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(incident, slack.format_resolved(incident, self._cluster))

    def _add(self, incident: Incident, message: dict[str, Any]) -> None:
        self._outbox.outbox_add(CHANNEL, incident.id, message, self._wall())
        self._added.set()

    # -- sending

    async def run(self) -> None:
        """Send until cancelled. Nothing that goes wrong here ends it."""
        while True:
            self._added.clear()
            try:
                wait_s = await self.send_next()
            except Exception:  # the boundary: an outbox that fails is tried again
                LOG.exception("the outbox can't be worked off")
                wait_s = self._poll_s
            if wait_s > self._min_gap_s:
                # Nothing to send now; a new message may be.
                try:
                    async with asyncio.timeout(min(wait_s, self._poll_s)):
                        await self._added.wait()
                except TimeoutError:
                    pass
            else:
                await asyncio.sleep(wait_s)

    async def send_next(self) -> float:
        """Send the oldest message if it is due; returns after how many seconds to call again.

        A message that fails holds up those behind it, for their order tells the story.
        """
        pending = self._outbox.outbox_pending(1)
        if not pending:
            return self._poll_s
        item, now = pending[0], self._wall()
        if now - item.added_at > STALE_AFTER_S:
            LOG.error(
                "message %d about %s is dropped: a day old, last failure: %s",
                item.id,
                item.incident_id,
                item.error,
            )
            self._outbox.outbox_done(item.id)
            return 0.0
        # A clock that was set back must not keep a message for longer than any retry takes.
        if now < item.retry_at <= now + LONGEST_WAIT_S:
            return item.retry_at - now
        try:
            await self._sender.send(item.payload)
        except SendFailed as error:
            return self._failed(item, error)
        self._outbox.outbox_done(item.id)
        return self._min_gap_s

    def _failed(self, item: OutboxItem, error: SendFailed) -> float:
        """Write down a failure; returns the pause until the next try."""
        if error.permanent:
            LOG.error("message %d about %s is dropped: %s", item.id, item.incident_id, error.reason)
            self._outbox.outbox_done(item.id)
            return self._min_gap_s
        backoff = min(LONGEST_RETRY_S, self._first_retry_s * 2 ** min(item.attempts, 20))
        asked_s = backoff if error.retry_after_s is None else min(error.retry_after_s, LONGEST_WAIT_S)
        wait_s = max(self._min_gap_s, asked_s)
        LOG.warning("message %d about %s waits %.0f s: %s", item.id, item.incident_id, wait_s, error.reason)
        self._outbox.outbox_failed(item.id, error.reason, self._wall() + wait_s)
        return wait_s


def make_notifier(config: Config, outbox: Outbox) -> Notifier:
    """The notifier that the configuration asks for: Slack, or the log."""
    settings = config.notify.slack
    if not settings.webhook_url_file:
        return Notifier(outbox, LogSender(), config.cluster_name, min_gap_s=0.0)
    return Notifier(
        outbox, slack.SlackWebhook(settings.webhook_url_file, settings.deadline), config.cluster_name
    )
