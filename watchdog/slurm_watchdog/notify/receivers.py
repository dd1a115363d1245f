"""Receivers of `notify.receivers`: each has rows of its own in the outbox, and gets what its route lets through."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

import msgspec

from slurm_watchdog.knowledge.message_templates import fill
from slurm_watchdog.notify import SendFailed
from slurm_watchdog.notify.digest import Digest
from slurm_watchdog.notify.http import post_json
from slurm_watchdog.notify.links import NO_LINKS, SiteLinks
from slurm_watchdog.notify.notification import Notice, Topic, from_row
from slurm_watchdog.notify.receiver_documents import PAGERDUTY, PAGERDUTY_EVENTS, Letter, mail, pagerduty, teams
from slurm_watchdog.notify.slack import read_secret, read_url
from slurm_watchdog.notify.smtp import Mailer
from slurm_watchdog.notify.weekly_message import words_of_row
from slurm_watchdog.notify.wording import message_of

if TYPE_CHECKING:
    from slurm_watchdog.config.receivers import Receiver
    from slurm_watchdog.journal.outbox import OutboxItem
    from slurm_watchdog.notify.delivery import Outbox

GAP_S: Final = 1.0
SINGLE: Final = 20
"""More messages than these are one digest."""
AT_ONCE: Final = 500


class ReceiverChannel:
    """See the module. `settings` is the configuration's."""

    topics = frozenset(Topic)
    takes_messages = False

    def __init__(self, settings: Receiver, cluster: str, places: SiteLinks = NO_LINKS, url: str = "") -> None:
        """`url`: in the place of PagerDuty's."""
        self.name = f"to-{settings.name}"
        self._settings, self._cluster, self._places, self._url = settings, cluster, places, url or PAGERDUTY
        self._mailer = Mailer(settings)

    async def send_due(self, outbox: Outbox, now: float) -> float | None:
        """See delivery.Channel."""
        items = outbox.pending(AT_ONCE, self.name)
        for item in items:
            if (weekly := words_of_row(item.payload)) is not None:
                await self._send(item.id, Letter(message=weekly, cluster=self._cluster, event="weekly_report"), now)
                outbox.done_all(self.name, [item.id])
                return GAP_S
        wanted = [(item, notice) for item in items if (notice := _notice(item)) is not None and self._lets(notice)]
        kept = {item.id for item, _ in wanted}
        outbox.done_all(self.name, [item.id for item in items if item.id not in kept])
        if not wanted:
            return GAP_S if items else None
        if len(wanted) > SINGLE and self._settings.type != "pagerduty":
            digest = Digest({})
            for _, notice in wanted:
                digest.add(notice)
            await self._send(wanted[0][0].id, Letter(message=digest.words(), cluster=self._cluster), now)
            outbox.done_all(self.name, [item.id for item, _ in wanted])
            return GAP_S
        item, notice = wanted[0]
        letter = Letter(message=message_of(notice), cluster=self._cluster, notice=notice, places=self._places)
        await self._send(item.id, letter, now)
        outbox.done_all(self.name, [item.id])
        return GAP_S

    def _lets(self, notice: Notice) -> bool:
        """Whether this receiver gets it."""
        route, incident, settings = self._settings.route, notice.incident, self._settings
        if settings.only_persons if settings.only_persons is not None else settings.type == "pagerduty":
            ends = settings.type == "pagerduty" and notice.topic in PAGERDUTY_EVENTS
            ends = ends and (notice.topic is not Topic.NOTED or bool(notice.acknowledged_by))  # else it is silenced
            if not (notice.needs_person or ends):
                return False
        of_jobs = (("partition", route.partition), ("account", route.account), ("user", route.user))
        return (
            (not route.severity or incident.severity.value in route.severity)
            and (not route.kinds or incident.kind in route.kinds)
            and all(
                not globs or any(fnmatchcase(getattr(job, name), glob) for job in notice.jobs for glob in globs)
                for name, globs in of_jobs
            )
        )

    async def _send(self, key: int, letter: Letter, now: float) -> None:
        """`key`: number of its row in the outbox. Raises SendFailed."""
        settings, where = self._settings, f"notify.receivers.{self._settings.name}"
        if settings.type == "email":
            to = self._addresses(letter.notice)
            if to:
                try:
                    message = mail(letter, settings.sender, to, now)
                except (ValueError, LookupError) as error:  # words that no mail can hold: they will not get better
                    raise SendFailed(f"no mail can be made of it: {error}", permanent=True) from error
                await self._mailer.send(key, message, to)
            return
        headers = {}
        if settings.type == "pagerduty":
            url = read_url(settings.url_file, f"{where}.url_file") if settings.url_file else self._url
            document = pagerduty(letter, read_secret(settings.key_file, f"{where}.key_file"))
        else:
            url = read_url(settings.url_file, f"{where}.url_file")
            document = teams(letter) if settings.type == "teams" else fill(settings.template, letter.values())
        if settings.token_file:
            headers["Authorization"] = f"Bearer {read_secret(settings.token_file, f'{where}.token_file')}"
        await post_json(url, document, settings.deadline, receiver=settings.name, headers=headers)

    def _addresses(self, notice: Notice | None) -> list[str]:
        """Who gets a mail; owners get what is about their jobs alone."""
        users = dict.fromkeys(job.user for job in notice.jobs) if notice is not None and self._settings.owner else {}
        whole = notice is not None and len(notice.jobs) == len(notice.incident.job_ids)
        own = list(users) if len(users) == 1 and whole else []
        fit = [user for user in own if user.replace("-", "").replace(".", "").replace("_", "").isalnum()]
        return [*self._settings.to, *(self._settings.owner.replace("{user}", user) for user in fit)]


def _notice(item: OutboxItem) -> Notice | None:
    try:
        return from_row(item.payload)
    except msgspec.ValidationError:
        return None  # a row of another release
