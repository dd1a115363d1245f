"""Slack: an incoming webhook, or a bot with its token, which can open threads and change its own messages. One thread
an incident, few messages a minute, and one digest instead of many."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_watchdog.notify.notification import Site, Topic
from slurm_watchdog.notify.programs import (
    DEADLINE_S,
    Numbered,
    SendFailed,
    pending_notices,
    post_json,
    read_secret,
    read_url,
)
from slurm_watchdog.notify.slack_messages import Digest, Payload, card, listing, reply, updated

if TYPE_CHECKING:
    from slurm_watchdog.config.notify import Slack
    from slurm_watchdog.journal.outbox import SqlOutbox

LOG = logging.getLogger(__name__)

OF_THE_MESSAGE = ("invalid_ar", "invalid_at", "invalid_blocks", "msg_", "no_text", "too_many_attachments", "metadata_")
"""How errors of chat.postMessage begin after which the same message is not sent again. All others (a token that was
revoked, a channel that was archived, an outage) may be mended:
https://docs.slack.dev/reference/methods/chat.postMessage#errors"""
OF_THE_THREAD = ("thread_not_found", "message_not_found", "cannot_reply", "invalid_thread_ts", "cant_update_message")
"""The first message was deleted: the next one is posted without a thread."""
WINDOW_S = 60.0
MIN_GAP_S = 1.0
"""Slack takes about one message a second in a channel: https://docs.slack.dev/apis/web-api/rate-limits"""
DIGEST_EVERY_S = 60.0
MAX_SINGLE_ROWS = 40  # more rows than this become a digest; fewer are sent by incident
ROWS_AT_ONCE = 200  # are read: the controller's loop runs in between
POLL_S = 5.0
REST_COMES_S = 15.0  # without a thread a message waits so long for the decision, or for the end after an action's
UNTHREADED = "-"  # in the place of a thread, of what went to a webhook


class SlackPoster:
    """Posts to the incoming webhook, or as the bot (scope chat:write), whose file the configuration names; it is read
    for each message, and what is in it appears in no log and no exception. A thread's name is `CHANNEL/TIMESTAMP`."""

    def __init__(self, settings: Slack, deadline_s: float = DEADLINE_S) -> None:
        self._settings, self.threads = settings, bool(settings.token_file)
        self._send = partial(post_json, receiver="Slack", deadline_s=deadline_s)

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        """Returns the name of the thread that begins with it, None if there are none. `loud`: a reply that the channel
        sees, too. Raises SendFailed."""
        if not self.threads:
            url = read_url(self._settings.webhook_url_file, "notify.slack.webhook_url_file")
            await self._send(url, message)
            return None
        channel, _, at = (thread or "").partition("/")
        below = {"thread_ts": at, "reply_broadcast": loud} if thread else {}
        answer = await self._call("chat.postMessage", message | {"channel": channel or self._settings.channel} | below)
        if answer is None:
            return await self.post(message)
        begun, where = answer.get("ts"), answer.get("channel")
        return thread if thread or not (begun and where) else f"{where}/{begun}"

    async def revise(self, thread: str, message: Payload) -> None:
        """Puts `message` in the place of the first one of a thread, if that is still there. Raises SendFailed."""
        channel, _, at = thread.partition("/")
        shown = {key: message[key] for key in ("text", "blocks", "link_names")}
        await self._call("chat.update", shown | {"channel": channel, "ts": at})

    async def _call(self, method: str, arguments: Payload) -> dict[str, Any] | None:
        """What Slack answers; None if the thread is gone. Raises SendFailed."""
        token = read_secret(self._settings.token_file, "notify.slack.token_file")
        url = f"{self._settings.api_url.rstrip('/')}/{method}"
        said = await self._send(url, arguments | {"parse": "none"}, token=token, answers=True)
        try:
            answer: dict[str, Any] = msgspec.json.decode(said, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise SendFailed("Slack cannot be reached (the answer is not Slack's)") from None
        if answer.get("ok") is True:
            return answer
        code = str(answer.get("error", ""))
        if code.startswith(OF_THE_THREAD) and ("thread_ts" in arguments or "ts" in arguments):
            return None
        code = code if code.isidentifier() else "an error of another form"  # it may repeat the request
        raise SendFailed(f"Slack answered: {code[:100]}", permanent=code.startswith(OF_THE_MESSAGE))


class MessageRate:
    """At most `limit` messages in any minute, a second between two. A clock that was set back counts for nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sent: deque[float] = deque(maxlen=limit)
        self.count_message = self._sent.append  # with the date at which a message went out, or may have

    def _recent(self, now: float) -> list[float]:
        return [at for at in self._sent if now - WINDOW_S < at <= now]

    def free(self, now: float) -> int:
        """How many may go out now."""
        return self.limit - len(self._recent(now))

    def wait_s(self, now: float) -> float:
        """How long until the next may."""
        recent = self._recent(now)
        full_s = WINDOW_S - (now - recent[0]) + 0.01 if len(recent) >= self.limit else 0.0
        return max(0.0, full_s, MIN_GAP_S - (now - recent[-1])) if recent else 0.0


class SlackChannel:
    """The notifier's channel to one channel of Slack. `pulses`: a headline and a line about each job, sent every
    `pulse` of the settings while nothing else waits."""

    name = "slack"
    topics = frozenset(Topic)

    def __init__(
        self, poster: SlackPoster, site: Site, settings: Slack, pulses: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._poster, self._site = poster, site
        self._pace = MessageRate(settings.messages_per_minute)
        self._digest_at = float("-inf")
        self._pulse_s, self._pulses = settings.pulse, pulses
        self._pulse: float | None = None  # number of the newest interval that has its pulse

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """Sends what is due of the oldest rows, and marks them as done. Returns after how many seconds to call again,
        None if there is nothing to do. Raises SendFailed with what comes first still to be done, and JournalError."""
        wait_s = self._pace.wait_s(now)
        if wait_s > 0:
            return wait_s
        notices = pending_notices(outbox, self.name, MAX_SINGLE_ROWS + 1)
        stories: dict[str, list[Numbered]] = {}
        for each in notices:
            stories.setdefault(each[1].incident.id, []).append(each)
        due = [rows for rows in stories.values() if self._poster.threads or self._is_due(outbox, rows, now)]
        free, many = self._pace.free(now), len(notices) > MAX_SINGLE_ROWS
        many = many or len(due) > max(1, free)
        if not due and not many:
            if not stories:
                await self._post_pulse(now)
            return MIN_GAP_S if stories else None
        failed = bool(due) and any(notice.failed for _, notice in due[0])
        digest_due_s = DIGEST_EVERY_S - (now - self._digest_at)
        storm = 0 < digest_due_s <= DIGEST_EVERY_S  # which may continue: new incidents go into the next digest
        if many and not (failed and free > 1):
            if storm:
                return min(POLL_S, digest_due_s)
            await self._post_digest(outbox, now)
        elif storm and not many and not failed and free < self._pace.limit - 1:
            return POLL_S
        else:
            await self._post_story(outbox, due[0], now)
        return 0.0

    def _is_due(self, outbox: SqlOutbox, rows: Sequence[Numbered], now: float) -> bool:
        """Where nothing can be put into a thread: two messages an incident, one with what was decided and one with how
        it ended, and one more where a person has to act. What those will say is taken off unsent."""
        story = [notice for _, notice in rows]
        topics, incident = {notice.topic for notice in story}, story[0].incident
        if Topic.RESOLVED in topics or any(notice.needs_person for notice in story):
            return True
        is_known = outbox.thread_of(self.name, incident.id) is not None
        if is_known and Topic.ENDED not in topics:
            outbox.done_all(self.name, [number for number, _ in rows])
            return False
        more_comes = is_known or (incident.job_ids and topics <= {Topic.OPENED, Topic.DIAGNOSED})
        return not (more_comes and 0 <= now - story[-1].at < REST_COMES_S)

    async def _post_story(self, outbox: SqlOutbox, rows: Sequence[Numbered], now: float) -> None:
        """Posts all waiting notices of one incident, in one message: the first in the channel, others in its thread."""
        story = [notice for _, notice in rows]
        incident, threads = story[0].incident, self._poster.threads
        thread = known = outbox.thread_of(self.name, incident.id) if threads else None
        over = [notice for notice in story if notice.topic is Topic.RESOLVED]
        if thread is None:
            thread = await self._post(card(story, self._site), None, now)
            outbox.keep_thread(self.name, incident.id, thread or UNTHREADED, now)
        elif len(over) < len(story):
            loud = any(notice.failed for notice in story)
            await self._post(reply(story, self._site), thread, now, loud=loud)
        outbox.done_all(self.name, [number for number, _ in rows])
        cause = over[0].incident.inhibited_by if over else None
        if thread and cause is not None and outbox.thread_of(self.name, cause) is None:
            outbox.keep_thread(self.name, cause, thread, now)  # its cause takes this message over
        if thread and (over or known):
            try:  # an edit notifies no user
                await self._poster.revise(thread, card(over, self._site) if over else updated(story, self._site))
            except SendFailed as error:
                LOG.warning("the first message about %s stays as it is: %s", incident.id, error.reason)

    async def _post(self, message: Payload, thread: str | None, now: float, *, loud: bool = False) -> str | None:
        # Counted before: the message may have been posted although its answer was lost.
        self._pace.count_message(now)
        return await self._poster.post(message, thread, loud=loud)

    async def _post_digest(self, outbox: SqlOutbox, now: float) -> None:
        """One message in the place of as many rows as it takes."""
        digest, last = Digest(self._site), 0
        while not digest.is_full and (page := pending_notices(outbox, self.name, ROWS_AT_ONCE, last)):
            for _, notice in page:
                digest.add(notice)
            last = page[-1][0]
            await asyncio.sleep(0)
        self._digest_at = self._digest_at if digest.is_full else now  # what did not fit need not wait
        await self._post(digest.message(self._site.cluster), None, now)
        outbox.done_through(self.name, last)

    async def _post_pulse(self, now: float) -> None:
        """On the grid of the wall clock: a restarted controller repeats none, and after an outage of Slack only the
        newest is sent."""
        number = now // self._pulse_s if self._pulse_s > 0 else None
        if self._pulse is not None and number != self._pulse and (said := self._pulses()):
            text, end = f"[{self._site.cluster}] {said[0]}", "All jobs: slurm-watchdog status"
            await self._post(listing(text, said[1:], end), None, now)
        self._pulse = number
