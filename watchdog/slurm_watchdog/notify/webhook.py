"""A generic webhook: events as JSON to the site's own address, at least once, in order, several per request; and the
heartbeat, to an address that rings when none comes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_watchdog.notify.delivery import send_together
from slurm_watchdog.notify.http import SendFailed, post_json, read_secret, read_url
from slurm_watchdog.notify.notification import NO_LINKS, Notice, SiteLinks, Topic, from_row
from slurm_watchdog.notify.wording import message_of

if TYPE_CHECKING:
    from slurm_watchdog.journal.outbox import OutboxItem, SqlOutbox

LOG = logging.getLogger(__name__)

VERSION = 1
BATCH = 100
"""Events in one request; some 2 KiB each."""
GAP_S = 1.0
OURS = frozenset({"pending_mono", "clear_mono", "heard_mono"})
"""Fields that mean something to the controller's own clock only."""


class WebhookChannel:
    """Posts to the address in `url_file`, with the token in `token_file` as a bearer if one is named; both
    are read for each request."""

    name = "webhook"
    topics = frozenset(Topic)

    def __init__(
        self, url_file: str, token_file: str, deadline_s: float, cluster: str, places: SiteLinks = NO_LINKS
    ) -> None:
        self._url_file = url_file
        self._token_file = token_file
        self._deadline_s = deadline_s
        self._cluster = cluster
        self._places = places

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """See delivery.Channel."""
        items = outbox.pending(BATCH, self.name)
        if not items:
            return None
        await send_together(outbox, self.name, items, self._post)
        return GAP_S

    async def _post(self, items: Sequence[OutboxItem]) -> None:
        headers = {}
        if self._token_file:
            headers["Authorization"] = f"Bearer {read_secret(self._token_file, 'notify.webhook.token_file')}"
        url = read_url(self._url_file, "notify.webhook.url_file")
        document = {
            "version": VERSION, "cluster": self._cluster, "events": [_event(item, self._places) for item in items],
        }  # fmt: skip
        await post_json(url, document, self._deadline_s, receiver="the webhook", headers=headers)


def _event(item: OutboxItem, places: SiteLinks) -> dict[str, Any]:
    """One event; `id` is the same each time it is sent, so that a receiver can drop duplicates."""
    try:
        notice = from_row(item.payload)
    except msgspec.ValidationError:
        return {"id": item.id, "event": "unreadable", "at": item.added_at}
    return event_json(notice, places) | {"id": item.id}


def event_json(notice: Notice, places: SiteLinks = NO_LINKS) -> dict[str, Any]:
    """The JSON of one event: the sentence for people, and every value by its name in the journal."""
    incident = msgspec.to_builtins(notice.incident)
    return {
        "event": notice.topic.value,
        "at": notice.at,
        "text": message_of(notice).sentence,
        "needs_person": notice.needs_person,
        "links": {
            "page": places.incident_url(notice.incident.id),
            "runbook": places.runbook(notice.incident.kind),
        },
        "incident": {key: value for key, value in incident.items() if key not in OURS},
        "jobs": msgspec.to_builtins(notice.jobs),
        "decision": None if notice.decision is None else msgspec.to_builtins(notice.decision),
        "action": None if notice.run is None else msgspec.to_builtins(notice.run),
        "said": list(notice.said if notice.topic is Topic.NOTED else notice.said[1:]),
    }


class Heartbeat:
    """Sends one when asked to, only after a whole tick of a controller that sees: it proves more than that a process is
    there. Says once that it cannot."""

    def __init__(self, url_file: str, deadline_s: float, cluster: str, healthy: Callable[[], tuple[bool, str]]) -> None:
        self._url_file, self._deadline_s, self._cluster, self._healthy = url_file, deadline_s, cluster, healthy
        self._error = ""

    async def beat(self) -> bool:
        """Whether one was sent."""
        good, sentence = self._healthy()
        if not good:
            return False
        try:
            url = read_url(self._url_file, "notify.heartbeat.url_file")
            document = {"cluster": self._cluster, "detail": sentence}
            await post_json(url, document, self._deadline_s, receiver="the heartbeat's receiver")
        except SendFailed as error:
            if error.reason != self._error:
                LOG.warning("the heartbeat is not delivered: %s", error.reason)
            self._error = error.reason
            return False
        self._error = ""
        return True
