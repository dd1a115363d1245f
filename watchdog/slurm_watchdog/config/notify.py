"""The section `notify` of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from slurm_watchdog.config.types import AbsolutePath, Link, Mention, Seconds, Section, checked, is_url, shown

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_secure(url: str) -> bool:
    """https, or http where tokens and texts don't leave this machine's network by accident: on the loopback address."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in LOOPBACK))


def _secure_url(url: str) -> None:
    if not is_secure(url):
        raise ValueError(f"must be an https:// address, got {shown(url)}")


def _url(url: str) -> None:
    if not is_url(url):
        raise ValueError(f"must be http://HOST:PORT, got {shown(url)}")


class Slack(Section, frozen=True):
    """Messages to Slack, by an incoming webhook or as a bot, who opens a thread for each incident."""

    webhook_url_file: AbsolutePath = ""
    """A file with the webhook's address, which is a secret; empty = no webhook."""
    token_file: AbsolutePath = ""
    """A file with a bot's token (xoxb-…, scope chat:write), in the place of the webhook."""
    channel: str = ""
    """Where the bot writes: the id of a channel that it was invited to, such as C024BE91L."""
    api_url: Annotated[str, checked(_secure_url)] = "https://slack.com/api/"
    """Slack's own API; another one for GovSlack."""
    messages_per_minute: Annotated[int, Meta(ge=1, le=60)] = 5
    """At most so many messages; the rest is one digest."""
    mention: Mention = ""
    """Who is mentioned where a person is needed: the id of a member (U…) or group (S…), here or channel."""
    pulse: Seconds = 0.0
    """Every so often a line about each job, such as 1h; 0s = never."""

    def problems(self) -> Iterator[str]:
        if self.token_file and self.webhook_url_file:
            yield "token_file: name a token or a webhook, not both"
        if self.token_file and not self.channel:
            yield "channel: required with token_file: where the bot writes"
        if 0 < self.pulse < 60:
            yield "pulse: must be 0s or at least 1min"


class Webhook(Section, frozen=True):
    """Every event as JSON, to an address of your own: at least once, in order."""

    url_file: AbsolutePath = ""
    """A file with its address, which may be a secret; empty = no webhook."""
    token_file: AbsolutePath = ""
    """A file with a token that goes along as a bearer; empty = none."""


class Alertmanager(Section, frozen=True):
    """Incidents as alerts, straight to Alertmanager."""

    urls: tuple[Annotated[str, checked(_url)], ...] = ()
    """Addresses of all Alertmanagers of one cluster, such as ['http://alerts:9093']."""


class Heartbeat(Section, frozen=True):
    """Dead man's switch: an address outside that alarms when no request comes."""

    url_file: AbsolutePath = ""
    """A file with its address, which may be a secret; empty = none is sent."""


class Notify(Section, frozen=True):
    """Who is notified. Without a receiver, the controller's log has everything."""

    external_url: Link = ""
    """The page's address as people reach it, such as https://watchdog.example.org."""
    runbook_url: Link = ""
    """Address of your runbook for a kind of incident, with {kind} in it."""

    slack: Slack = Slack()
    webhook: Webhook = Webhook()
    alertmanager: Alertmanager = Alertmanager()
    heartbeat: Heartbeat = Heartbeat()

    def secret_files(self) -> list[str]:
        """Paths of all files with an address, token, key or password of someone who is notified."""
        slack, webhook = self.slack, self.webhook
        named = (slack.webhook_url_file, slack.token_file, webhook.url_file, webhook.token_file)
        return [path for path in (*named, self.heartbeat.url_file) if path]
