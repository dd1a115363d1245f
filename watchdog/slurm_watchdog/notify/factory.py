"""The notifier that the configuration asks for, and the test of each receiver in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.notify.alertmanager import AlertmanagerChannel
from slurm_watchdog.notify.delivery import Channel
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.notify.http import DEADLINE_S
from slurm_watchdog.notify.notification import TEST_SUBJECT, Caller, SiteLinks
from slurm_watchdog.notify.slack import SlackBot, SlackWebhook
from slurm_watchdog.notify.slack_channel import LogNotifier, MessageRate, PulseChannel, SlackChannel
from slurm_watchdog.notify.webhook import WebhookChannel

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.journal.outbox import SqlOutbox

LOG_MESSAGES_PER_MINUTE = 1_000_000
"""The log takes everything."""
REPEAT_S: Final = 60.0
"""What fires is sent to Alertmanager again so often: its resolve_timeout is 5 min as shipped."""
TRIES: Final = 8
"""Turns of one channel in a test: two messages, a change of the first, and the pauses that Slack's pace asks for."""
LONGEST_PAUSE_S: Final = 2.0
"""A receiver that asks for more than that between two messages has failed the test."""


def make_notifier(config: Config, outbox: SqlOutbox, caller: Caller = Caller.SERVICE) -> Notifier:
    """Slack, a webhook, Alertmanager, each if it is configured; the log if none is."""
    channels: list[Channel] = []
    slack, webhook, alerts, cluster = (
        config.notify.slack, config.notify.webhook, config.notify.alertmanager, config.cluster_name
    )  # fmt: skip
    places = SiteLinks(external_url=config.notify.external_url, runbook_url=config.notify.runbook_url)
    poster: SlackBot | SlackWebhook | None = None
    if slack.token_file:
        poster = SlackBot(slack.token_file, slack.channel, DEADLINE_S, slack.api_url)
    elif slack.webhook_url_file:
        poster = SlackWebhook(slack.webhook_url_file, DEADLINE_S)
    if poster is not None:
        pace = MessageRate(slack.messages_per_minute)
        channels.append(SlackChannel(poster, cluster, pace=pace, mentions=slack.mentions, places=places))
        if slack.pulse > 0:
            channels.append(PulseChannel(poster, pace))
    if webhook.url_file:
        channels.append(WebhookChannel(webhook.url_file, webhook.token_file, DEADLINE_S, cluster, places))
    if alerts.urls:
        channels.append(
            AlertmanagerChannel(alerts.urls, DEADLINE_S, REPEAT_S, cluster, lambda: notifier.sources, places)
        )
    if not channels:
        pace = MessageRate(LOG_MESSAGES_PER_MINUTE, gap_s=0.0)
        channels.append(SlackChannel(LogNotifier(), cluster, name="log", pace=pace))
    notifier = Notifier(outbox, channels, cluster, pulse_s=slack.pulse, caller=caller)
    return notifier


class Outcome(Struct, frozen=True, kw_only=True):
    """How one receiver took the test notice."""

    receiver: str
    error: str | None
    """Why it was not delivered; None: it was."""


def each_receiver(config: Config) -> Iterator[tuple[str, Config]]:
    """(name, the configuration with that receiver only): each is tried by itself, each Alertmanager of a
    cluster, too."""
    notify = config.notify
    parts: list[tuple[str, dict[str, object]]] = []
    if notify.slack.token_file or notify.slack.webhook_url_file:
        where = f"bot in channel {notify.slack.channel}" if notify.slack.token_file else "incoming webhook"
        parts.append((f"slack ({where})", {"slack": notify.slack}))
    if notify.webhook.url_file:
        parts.append(("webhook", {"webhook": notify.webhook}))
    for url in notify.alertmanager.urls:
        parts.append((f"alertmanager {url}", {"alertmanager": notify.alertmanager.model_copy(update={"urls": [url]})}))
    kept = {"external_url": notify.external_url, "runbook_url": notify.runbook_url}
    for name, part in parts:
        yield name, config.model_copy(update={"notify": type(notify)().model_copy(update=kept | part)})


async def try_receivers(
    config: Config, new_outbox: Callable[[], SqlOutbox], severity: Severity, now: float
) -> list[Outcome]:
    """Sends the test to every receiver at once, through the channels that send incidents. `now` is a date."""
    named = list(each_receiver(config))
    errors = await asyncio.gather(*(_try(make_notifier(one, new_outbox()), severity, now) for _, one in named))
    return [Outcome(receiver=name, error=error) for (name, _), error in zip(named, errors, strict=True)]


async def _try(notifier: Notifier, severity: Severity, now: float) -> str | None:
    """Opens and resolves a test incident, so that nothing stays open at the receiver; why that was not delivered, None
    if it was."""
    test = Incident(
        id=f"test{int(now)}", kind=IncidentKind.OPERATOR_RESTART, subject=TEST_SUBJECT, state=IncidentState.FIRING,
        severity=severity, job_ids=(), opened_at=now, fired_at=now, pending_mono=0.0,
        summary="This is a test of slurm-watchdog's notifications. Nothing is wrong.",
    )  # fmt: skip
    notifier.opened(test)
    failed = await notifier.deliver(TRIES, LONGEST_PAUSE_S)
    if failed is None:
        notifier.resolved(replace(test, state=IncidentState.RESOLVED, resolved_at=now, resolution="The test is over."))
        failed = await notifier.deliver(TRIES, LONGEST_PAUSE_S)
    return failed
