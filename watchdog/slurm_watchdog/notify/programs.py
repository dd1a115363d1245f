"""One POST of a JSON document within a deadline; receivers that take many notices in one: a webhook of the site's own,
Alertmanager. Addresses and tokens are secrets: they are read from their files for each request, and are in no log and
no exception."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.text import one_line, safe
from slurm_watchdog.config.notify import is_secure
from slurm_watchdog.model.incidents import Severity
from slurm_watchdog.notify.notification import Notice, Site, Topic, culprit_line, message_of

if TYPE_CHECKING:
    from slurm_watchdog.config.notify import Webhook
    from slurm_watchdog.journal.outbox import SqlOutbox

LOG = logging.getLogger(__name__)
ALERTED = frozenset({Topic.OPENED, Topic.RESOLVED})  # what Alertmanager gets
BATCH = 100  # notices in one request; some 2 KiB each
GAP_S = 1.0
REPEAT_S = 60.0  # what fires is sent to Alertmanager again so often: its resolve_timeout is 5 min as shipped
SEVERITIES = {Severity.CRITICAL: "page", Severity.WARNING: "ticket", Severity.INFO: "none"}
"""The words of deploy/prometheus/alerts.yaml, so that one routing serves both."""
LABEL_LIMIT = 200
TEXT_LIMIT = 1000
DEADLINE_S = 10.0  # of one request; an outage of a receiver never delays an action
ANSWER_BYTES = 1_000_000  # more is not read: Slack repeats the message in its answer
CAUSES: dict[type[Exception], str] = {
    ssl.SSLError: "its certificate is not trusted, or its TLS not understood",
    socket.gaierror: "its host name is not known",
    UnicodeError: "it is not UTF-8 text",
}
REFUSED_FOR_GOOD = frozenset({400, 413, 415, 422})  # others (404, 401, 403) may come while a receiver is being set up

Numbered = tuple[int, Notice]
"""A notice with the number of its row: the same each time it is sent, so that a receiver can drop duplicates."""


class SendFailed(Exception):
    """A message was not delivered. `permanent`: the same message will never be."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None, permanent: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s, self.permanent = reason, retry_after_s, permanent


async def post_json(
    url: str, document: Any, *, receiver: str, token: str = "", deadline_s: float = DEADLINE_S, answers: bool = False
) -> bytes:
    """Delivers `document` to `url`, with a token as a bearer if there is one. Returns what a receiver that `answers`
    has said. Raises SendFailed."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with (
            timeout(deadline_s),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=deadline_s)) as session,
            session.post(url, json=document, headers=headers, allow_redirects=False) as answer,
        ):
            said, taken = b"", 200 <= answer.status < 300
            while (answers or not taken) and len(said) < ANSWER_BYTES and (more := await answer.content.readany()):
                said += more
            if taken:
                return said
            status, asked = answer.status, answer.headers.get("Retry-After", "")
    except TimeoutError:
        raise SendFailed(f"{receiver} did not answer within {deadline_s:g} s") from None
    # `from None`: the exception below may hold the address.
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SendFailed(f"{receiver} cannot be reached ({why(error)})") from None
    # A receiver may repeat the request, with the address or its last part.
    text = said.decode(errors="replace")
    for secret in (token, url, urlsplit(url).path, url.rstrip("/").rpartition("/")[2]):
        text = text.replace(secret, "(secret)") if len(secret) > 3 else text
    asks = status in (429, 503) and asked.isascii() and asked.isdecimal()
    raise SendFailed(
        f"{receiver} answered {status}: {safe(text, 200)}",
        retry_after_s=float(asked) if asks else None,
        permanent=status in REFUSED_FOR_GOOD,
    )


def why(error: Exception) -> str:
    """What a connection, or a file with a secret, failed with: `Connection refused`, `its host name is not known`."""
    cause = getattr(error, "os_error", None) or error
    if "DNS" in type(error).__name__:
        return CAUSES[socket.gaierror]
    known = [words for kind, words in CAUSES.items() if isinstance(cause, kind) or isinstance(error, kind)]
    number = cause.errno if isinstance(cause, OSError) else None
    return next(iter(known), os.strerror(number) if number else type(error).__name__)


def read_secret(file: str, key: str) -> str:
    """The one line of a file; empty for no file. Raises SendFailed, without what is in it."""
    if not file:
        return ""
    try:
        text = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
        raise SendFailed(f"{key} {file} cannot be read ({why(error)})") from None
    if not text or not text.isprintable() or not text.isascii():
        raise SendFailed(f"{key} {file} does not hold one line of plain text")
    return text


def read_url(file: str, key: str) -> str:
    """An address from a file. Raises SendFailed, without naming the address."""
    url = read_secret(file, key)
    if not is_secure(url):
        raise SendFailed(f"{key} {file} holds no https:// address")
    return url


def pending_notices(outbox: SqlOutbox, channel: str, limit: int, after: int = 0) -> list[Numbered]:
    """The oldest that wait for a channel; rows that cannot be read are given up."""
    found = []
    for item in outbox.pending(limit, channel, after):
        try:
            found.append((item.id, msgspec.convert(item.payload, Notice)))
        except msgspec.ValidationError as error:
            LOG.error("message %d to %s cannot be read and is dropped: %s", item.id, channel, error)
            outbox.done_all(channel, (item.id,))
    return found


class Programs:
    """A channel of the notifier that sends its oldest rows together, in order, at least once."""

    def __init__(
        self, name: str, post: Callable[[Sequence[Numbered]], Awaitable[None]],
        topics: frozenset[Topic] = frozenset(Topic), firing: Callable[[], Sequence[Notice]] | None = None,
    ) -> None:  # fmt: skip
        """`firing`: what is sent again every REPEAT_S, for a receiver that forgets."""
        self.name, self.topics = name, topics
        self._post, self._firing = post, firing
        self._repeated_at = float("-inf")

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """See SlackChannel. News go before repeats."""
        if news := pending_notices(outbox, self.name, BATCH):
            try:
                await self._post(news)
            except SendFailed as error:
                if not error.permanent or len(news) == 1:
                    raise
                news = news[:1]
                await self._post(news)  # alone, so that only what is refused is dropped
            outbox.done_all(self.name, [number for number, _ in news])
            return GAP_S
        if self._firing is not None and not 0 <= now - self._repeated_at < REPEAT_S:
            again = [(0, notice) for notice in self._firing()]
            for start in range(0, len(again), BATCH):
                await self._post(again[start : start + BATCH])
            self._repeated_at = now
        return None


async def post_events(settings: Webhook, site: Site, notices: Sequence[Numbered]) -> None:
    """Posts to the webhook; its files are read for each request. Raises SendFailed."""
    token = read_secret(settings.token_file, "notify.webhook.token_file")
    url = read_url(settings.url_file, "notify.webhook.url_file")
    events = [event_json(notice, site) | {"id": number} for number, notice in notices]
    document = {"version": 1, "cluster": site.cluster, "events": events}
    await post_json(url, document, receiver="the webhook", token=token)


def event_json(notice: Notice, site: Site) -> dict[str, Any]:
    """The JSON of one event: the sentence for people, and every value by its name in the journal."""
    event = {
        "event": notice.topic,
        "at": notice.at,
        "headline": notice.headline,
        "text": message_of(notice).sentence,
        "needs_person": notice.needs_person,
        "links": {"page": site.page(notice.incident), "runbook": site.runbook(notice.incident)},
        "incident": notice.incident,
        "jobs": notice.jobs,
        "decision": notice.decision,
        "action": notice.run,
        "said": notice.said if notice.topic is Topic.NOTED else notice.said[1:],
    }
    return dict(msgspec.to_builtins(event))


async def post_alerts(urls: Sequence[str], site: Site, notices: Sequence[Numbered]) -> None:
    """Posts to every Alertmanager of a cluster, as its manual asks; one that answers is enough. An incident alerts as
    soon as it fires, with its sentence. An alert that is not repeated ends after Alertmanager's `resolve_timeout`
    (5 min), so a stopped controller leaves no alert behind: https://prometheus.io/docs/alerting/latest/alerts_api/
    Raises SendFailed if none of them took it."""
    alerts = [alert for _, notice in notices for alert in alerts_json(notice, site)]
    failures = []
    for url in urls:
        try:
            await post_json(f"{url.rstrip('/')}/api/v2/alerts", alerts, receiver="Alertmanager")
        except SendFailed as error:
            failures.append(error)
    if len(failures) == len(urls):
        raise next((error for error in failures if not error.permanent), failures[0])


def alerts_json(notice: Notice, site: Site) -> list[dict[str, Any]]:
    """The alert that begins with this notice, of lower severity while it is acted on; or those that end: the one that
    calls a person, and the one while an action was under way. Labels stay the same for the incident's whole life."""
    incident, over = notice.incident, notice.topic is Topic.RESOLVED
    labels = {
        "alertname": "SlurmWatchdogIncident", "cluster": site.cluster, "kind": str(incident.kind),
        "incident": incident.id, "job_id": incident.job_ids[0] if len(incident.job_ids) == 1 else "",
    }  # fmt: skip
    said = message_of(notice)
    annotations = {
        "summary": [notice.headline],
        "description": [said.sentence, *incident.facts[:10]],
        "who": ["; ".join(map(culprit_line, incident.culprits[:3]))],
        "job": [job.words for job in notice.jobs[:1]],
        "next": [said.todo],
        "runbook_url": [site.runbook(incident)],
    }
    texts = {key: "\n".join(one_line(line, TEXT_LIMIT) for line in lines) for key, lines in annotations.items()}
    alert = {
        "annotations": {key: text for key, text in texts.items() if text},
        "startsAt": _date(incident.fired_at or incident.opened_at),
        **({"endsAt": _date(incident.resolved_at or notice.at)} if over else {}),
        **({"generatorURL": site.page(incident)} if site.external_url else {}),
    }
    usual = SEVERITIES[incident.severity]
    acted = "ticket" if usual == "page" else usual
    severities = dict.fromkeys((usual, acted) if over else (acted if notice.acted_on else usual,))
    shown = {key: one_line(value, LABEL_LIMIT) for key, value in labels.items() if value}
    return [alert | {"labels": shown | {"severity": severity}} for severity in severities]


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, tz=timezone.utc).isoformat()
