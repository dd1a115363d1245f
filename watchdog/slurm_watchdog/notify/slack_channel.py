"""The Slack channel: one thread per incident, few messages a minute, and one digest instead of many."""

from __future__ import annotations

import asyncio
import html
import logging
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from slurm_watchdog.notify.delivery import LONGEST_WAIT_S
from slurm_watchdog.notify.digest import Digest
from slurm_watchdog.notify.http import SendFailed
from slurm_watchdog.notify.job_status_message import PULSE_CHANNEL
from slurm_watchdog.notify.notification import NO_LINKS, Notice, SiteLinks, Topic, from_row
from slurm_watchdog.notify.slack import Poster
from slurm_watchdog.notify.slack_messages import Payload, closed, has_evidence, parent, reply, updated

if TYPE_CHECKING:
    from slurm_watchdog.journal.outbox import OutboxItem, SqlOutbox

LOG = logging.getLogger(__name__)
Sent = TypeVar("Sent")

WINDOW_S = 60.0
MIN_GAP_S = 1.0
"""Slack takes about one message a second in a channel: https://docs.slack.dev/apis/web-api/rate-limits"""
DIGEST_EVERY_S = 60.0
MAX_SINGLE_ROWS = 40
"""More rows than this become a digest; fewer are sent by incident."""
ROWS_AT_ONCE = 200
"""Rows read at once: the controller's loop runs in between."""
POLL_S = 5.0
DIGEST_ID = "digest"


class MessageRate:
    """At most `limit` messages in any minute, a second between two, and none while Slack has asked for silence."""

    def __init__(self, limit: int, gap_s: float = MIN_GAP_S) -> None:
        self.limit = limit
        self.gap_s = gap_s
        self._sent: deque[float] = deque(maxlen=limit)
        self._silent_until = float("-inf")

    async def send(self, now: float, sending: Awaitable[Sent]) -> Sent:
        """What `sending` gives. A refusal that names a time holds for all that share this pace. Raises SendFailed."""
        try:
            return await sending
        except SendFailed as error:
            if error.retry_after_s is not None:
                self._silent_until = now + min(error.retry_after_s, LONGEST_WAIT_S)
            raise

    def count_message(self, now: float) -> None:
        """A message went out, or may have."""
        while self._sent and not now - WINDOW_S < self._sent[0] <= now:
            self._sent.popleft()
        self._sent.append(now)

    def free(self, now: float) -> int:
        """How many may go out now. A clock that was set back counts for nothing."""
        return self.limit - sum(1 for at in self._sent if now - WINDOW_S < at <= now)

    def wait_s(self, now: float) -> float:
        """How long until the next may."""
        silent_s = self._silent_until - now
        if 0 < silent_s <= LONGEST_WAIT_S:
            return silent_s
        recent = [at for at in self._sent if now - WINDOW_S < at <= now]
        if not recent:
            return 0.0
        gap_s = self.gap_s - (now - recent[-1])
        full_s = WINDOW_S - (now - recent[0]) + 0.01 if len(recent) >= self.limit else 0.0
        return max(0.0, gap_s, full_s)


class SlackChannel:
    """One channel of Slack. `mentions` is the configuration's."""

    topics = frozenset(Topic)

    def __init__(
        self,
        poster: Poster,
        cluster: str,
        *,
        name: str = "slack",
        pace: MessageRate,
        mentions: Mapping[str, str] | None = None,
        places: SiteLinks = NO_LINKS,
    ) -> None:
        self.name = name
        self._poster = poster
        self._cluster = cluster
        self._pace = pace
        self._mentions = dict(mentions or {})
        self._places = places
        self._digest_at = float("-inf")

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """See delivery.Channel."""
        wait_s = self._pace.wait_s(now)
        if wait_s > 0:
            return wait_s
        items = outbox.pending(MAX_SINGLE_ROWS + 1, self.name)
        if not items:
            return None
        if "message" in items[0].payload:  # a digest: all that was put up before it is in it
            await self._post_digest(outbox, items[0], now)
            return 0.0
        notices = self._read(outbox, items)
        stories = _by_incident(notices)
        if not stories:
            return 0.0
        free = self._pace.free(now)
        if len(items) > MAX_SINGLE_ROWS or (len(stories) > 1 and len(stories) > free):
            if any(notice.urgent for notice in stories[0][1]) and free > 1:
                await self._post_story(outbox, *stories[0], now, whole=True)
                return 0.0
            if 0 <= now - self._digest_at < DIGEST_EVERY_S:
                return min(POLL_S, DIGEST_EVERY_S - (now - self._digest_at))
            await self._queue_digest(outbox, now)
            return 0.0
        urgent = any(notice.urgent for notice in stories[0][1])
        if 0 <= now - self._digest_at < DIGEST_EVERY_S and free < self._pace.limit - 1 and not urgent:
            return POLL_S  # the storm may continue: new incidents go into the next digest
        whole = not self._poster.threads or free < 2 * len(stories)
        await self._post_story(outbox, *stories[0], now, whole=whole)
        return 0.0

    def _read(self, outbox: SqlOutbox, items: Sequence[OutboxItem]) -> list[tuple[int, Notice]]:
        """(row, notice) of each. Rows that can't be read are given up."""
        found = []
        for item in items:
            try:
                found.append((item.id, from_row(item.payload)))
            except msgspec.ValidationError as error:
                LOG.error("message %d to %s can't be read and is dropped: %s", item.id, self.name, error)
                outbox.done_all(self.name, (item.id,))
        return found

    async def _post_digest(self, outbox: SqlOutbox, item: OutboxItem, now: float) -> None:
        """The parts after the first go into the thread of that one."""
        thread = outbox.thread_of(self.name, item.incident_id)
        begun = await self._post(item.payload["message"], thread, now)
        if begun is not None and thread is None:
            outbox.keep_thread(self.name, item.incident_id, begun, now)
        outbox.done_all(self.name, (item.id,))

    async def _post_story(
        self, outbox: SqlOutbox, ids: Sequence[int], story: Sequence[Notice], now: float, *, whole: bool
    ) -> None:
        """Posts all waiting notices of one incident, in one message or two: one in the channel, one in its thread."""
        incident = story[0].incident
        thread = outbox.thread_of(self.name, incident.id) if self._poster.threads else None
        over = next((notice for notice in story if notice.topic is Topic.RESOLVED), None)
        if thread is not None:
            if any(notice.topic is not Topic.RESOLVED for notice in story):
                loud = any(notice.urgent for notice in story)
                await self._post(reply(story, self._mentions, first=False), thread, now, loud=loud)
                if over is None:
                    await self._revise(thread, updated(story, self._cluster, self._places), incident.id, now)
        else:
            message = parent(story, self._cluster, self._mentions, whole=whole, places=self._places)
            thread = await self._post(message, None, now)
            if thread is not None:
                outbox.keep_thread(self.name, incident.id, thread, now)
                if not whole and has_evidence(story):
                    await self._post(reply(story, self._mentions, first=True), thread, now)
        outbox.done_all(self.name, ids)
        if thread is None or over is None:
            return
        cause = over.incident.inhibited_by
        if cause is not None and outbox.thread_of(self.name, cause) is None:
            outbox.keep_thread(self.name, cause, thread, now)  # its cause takes this message over
        await self._revise(thread, closed(over, self._cluster, self._places), incident.id, now)

    async def _revise(self, thread: str, message: Payload, incident_id: str, now: float) -> None:
        """Edits the parent message; that notifies no user."""
        try:
            await self._pace.send(now, self._poster.revise(thread, message))
        except SendFailed as error:
            LOG.warning("the first message about %s stays as it is: %s", incident_id, error.reason)

    async def _post(self, message: Payload, thread: str | None, now: float, *, loud: bool = False) -> str | None:
        # Counted before: the message may have been posted although its answer was lost.
        self._pace.count_message(now)
        return await self._pace.send(now, self._poster.post(message, thread, loud=loud))

    async def _queue_digest(self, outbox: SqlOutbox, now: float) -> None:
        """Replaces all waiting rows by one digest."""
        digest, last, number = Digest(self._mentions), 0, 0
        while page := outbox.pending(ROWS_AT_ONCE, self.name, last):
            notices = self._read(outbox, page)
            for _, notice in notices:
                digest.add(notice)
            number, last = number + len(notices), page[-1].id
            if len(page) < ROWS_AT_ONCE:
                break
            await asyncio.sleep(0)
        if number:
            LOG.warning("%d messages to %s are sent as a digest", number, self.name)
            rows = [{"message": each} for each in digest.messages(self._cluster)]
            outbox.replace(self.name, last, f"{DIGEST_ID}-{last}", rows, now)
        self._digest_at = now


class PulseChannel:
    """The hourly job status: its own outbox rows, so that no notice waits behind it, and the message rate
    that all of Slack shares."""

    name = PULSE_CHANNEL
    topics: frozenset[Topic] = frozenset()

    def __init__(self, poster: Poster, pace: MessageRate) -> None:
        self._poster = poster
        self._pace = pace

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """See delivery.Channel."""
        items = outbox.pending(1, self.name)
        if not items:
            return None
        wait_s = self._pace.wait_s(now)
        if wait_s > 0:
            return wait_s
        self._pace.count_message(now)
        await self._pace.send(now, self._poster.post(items[0].payload["message"]))
        outbox.done_all(self.name, (items[0].id,))
        return 0.0


class LogNotifier:
    """Writes messages to the log where no receiver is configured."""

    threads = False

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        """Log the first sentences of the message, without Slack's `&lt;` for `<`."""
        LOG.warning("message: %s", html.unescape(message.get("text", "")))
        return None

    async def revise(self, thread: str, message: Payload) -> None:
        """The log cannot be edited."""


def _by_incident(notices: Sequence[tuple[int, Notice]]) -> list[tuple[list[int], list[Notice]]]:
    """(rows, notices) of each incident, in the order in which they were first spoken of."""
    found: dict[str, tuple[list[int], list[Notice]]] = {}
    for number, notice in notices:
        ids, story = found.setdefault(notice.incident.id, ([], []))
        ids.append(number)
        story.append(notice)
    return list(found.values())
