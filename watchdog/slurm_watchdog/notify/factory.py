"""The notifier that the configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_watchdog.notify.alertmanager import AlertmanagerChannel
from slurm_watchdog.notify.delivery import Channel, Outbox
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.notify.links import SiteLinks
from slurm_watchdog.notify.notification import Caller
from slurm_watchdog.notify.receivers import ReceiverChannel
from slurm_watchdog.notify.slack import Poster, SlackBot, SlackWebhook
from slurm_watchdog.notify.slack_channel import LogNotifier, MessageRate, PulseChannel, SlackChannel
from slurm_watchdog.notify.webhook import WebhookChannel
from slurm_watchdog.notify.weekly_message import Subscription

if TYPE_CHECKING:
    from slurm_watchdog.config.notify import Notify
    from slurm_watchdog.config.schema import Config

LOG_MESSAGES_PER_MINUTE = 1_000_000
"""The log takes everything."""


def make_notifier(config: Config, outbox: Outbox, caller: Caller = Caller.SERVICE) -> Notifier:
    """Slack, a webhook, Alertmanager, and more receivers, each if it is configured; the log if none is."""
    channels: list[Channel] = []
    notifier: list[Notifier] = []
    settings, cluster = config.notify.slack, config.cluster_name
    places = SiteLinks(external_url=config.notify.external_url, runbook_url=config.notify.runbook_url)
    poster: Poster | None = None
    if settings.token_file:
        poster = SlackBot(settings.token_file, settings.channel, settings.deadline, settings.api_url)
    elif settings.webhook_url_file:
        poster = SlackWebhook(settings.webhook_url_file, settings.deadline)
    if poster is not None:
        pace = MessageRate(settings.messages_per_minute)
        channels.append(SlackChannel(poster, cluster, pace=pace, mentions=settings.mentions, places=places))
        if settings.pulse > 0 or settings.weekly_report:
            channels.append(PulseChannel(poster, pace))
    webhook, alertmanager = config.notify.webhook, config.notify.alertmanager
    if webhook.url_file:
        channels.append(WebhookChannel(webhook.url_file, webhook.token_file, webhook.deadline, cluster, places))
    if alertmanager.urls:
        channels.append(
            AlertmanagerChannel(
                alertmanager.urls,
                alertmanager.deadline,
                alertmanager.repeat,
                cluster,
                lambda: notifier[0].sources,
                places,
            )
        )
    channels += [ReceiverChannel(each, cluster, places) for each in config.notify.receivers]
    if not channels:
        channels.append(
            SlackChannel(LogNotifier(), cluster, name="log", pace=MessageRate(LOG_MESSAGES_PER_MINUTE, gap_s=0.0))
        )
    legacy_channel = next((each.name for each in channels if isinstance(each, SlackChannel)), "")
    notifier.append(
        Notifier(outbox, channels, cluster, legacy_channel=legacy_channel, pulse_s=settings.pulse, caller=caller)
    )
    wanted = _subscriptions(config.notify)
    notifier[0].weekly = {each.name: wanted[each.name] for each in channels if each.name in wanted}
    return notifier[0]


def _subscriptions(notify: Notify) -> dict[str, Subscription]:
    """Channel -> its subscription, of those that have one."""
    found = {
        PulseChannel.name: Subscription(when=notify.slack.weekly_report),
        WebhookChannel.name: Subscription(when=notify.webhook.weekly_report),
    }
    for each in notify.receivers:
        about = {"partition": each.route.partition, "account": each.route.account, "user": each.route.user}
        found[f"to-{each.name}"] = Subscription(
            when=each.weekly_report, about={name: ",".join(globs) for name, globs in about.items() if globs}
        )
    return {channel: each for channel, each in found.items() if each.when}
