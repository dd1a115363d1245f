"""A test notice for each receiver of the configuration, and its end: nothing stays open at a receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.notify.delivery import Outbox
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.notify.factory import make_notifier
from slurm_watchdog.notify.notification import TEST_SUBJECT

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

TRIES: Final = 8
"""Turns of one channel: two messages, a change of the first, and the pauses that Slack's pace asks for."""
LONGEST_PAUSE_S: Final = 2.0
"""A receiver that asks for more than that between two messages has failed the test."""


class Outcome(Struct, frozen=True, kw_only=True):
    """How one receiver took the test notice."""

    receiver: str
    error: str | None
    """Why it was not delivered; None: it was."""


def each_receiver(config: Config) -> Iterator[tuple[str, Config]]:
    """(name, the configuration with that receiver only): each is tried by itself, each Alertmanager of a
    cluster, too."""
    notify, empty = config.notify, type(config.notify)()
    only = notify.model_copy(
        update={name: getattr(empty, name) for name in ("slack", "webhook", "alertmanager", "receivers")}
    )
    parts: list[tuple[str, dict[str, object]]] = []
    if notify.slack.token_file or notify.slack.webhook_url_file:
        where = f"bot in channel {notify.slack.channel}" if notify.slack.token_file else "incoming webhook"
        parts.append((f"slack ({where})", {"slack": notify.slack}))
    if notify.webhook.url_file:
        parts.append(("webhook", {"webhook": notify.webhook}))
    for url in notify.alertmanager.urls:
        one = notify.alertmanager.model_copy(update={"urls": [url]})
        parts.append((f"alertmanager {url}", {"alertmanager": one}))
    for each in notify.receivers:
        everything = each.model_copy(update={"route": type(each.route)(), "only_persons": False})
        parts.append((f"{each.type} {each.name}", {"receivers": [everything]}))
    for name, part in parts:
        yield name, config.model_copy(update={"notify": only.model_copy(update=part)})


async def try_receivers(
    config: Config, new_outbox: Callable[[], Outbox], severity: Severity, now: float
) -> list[Outcome]:
    """Sends the test to every receiver at once, through the channels that send incidents. `now` is a date."""
    named = list(each_receiver(config))
    tried = (try_notifier(make_notifier(one, new_outbox()), severity, now) for _, one in named)
    errors = await asyncio.gather(*tried)
    return [Outcome(receiver=name, error=error) for (name, _), error in zip(named, errors, strict=True)]


async def try_notifier(
    notifier: Notifier, severity: Severity, now: float, pause_s: float = LONGEST_PAUSE_S
) -> str | None:
    """Opens and resolves a test incident; why that was not delivered, None if it was."""
    test = Incident(
        id=f"test{int(now)}", kind=IncidentKind.OPERATOR_RESTART, subject=TEST_SUBJECT, state=IncidentState.FIRING,
        severity=severity, job_ids=(), opened_at=now, fired_at=now, pending_mono=0.0,
        summary="This is a test of slurm-watchdog's notifications. Nothing is wrong.",
    )  # fmt: skip
    over = replace(test, state=IncidentState.RESOLVED, resolved_at=now, resolution="The test is over.")
    notifier.opened(test)
    failed = await notifier.deliver(TRIES, pause_s)
    if failed is None:
        notifier.resolved(over)
        failed = await notifier.deliver(TRIES, pause_s)
    return failed
