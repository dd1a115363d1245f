"""Receivers of `notify.receivers`: each has rows of its own in the outbox, and gets what its route lets through."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
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
from slurm_watchdog.notify.wording import Message, message_of

if TYPE_CHECKING:
    from slurm_watchdog.config.receivers import Receiver
    from slurm_watchdog.journal.outbox import OutboxItem
    from slurm_watchdog.notify.delivery import Outbox

LOG = logging.getLogger(__name__)

GAP_S: Final = 1.0
SINGLE: Final = 20
"""More messages than these are one digest."""
AT_ONCE: Final = 500
MAIL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}")
"""Users who have an address: a server without SMTPUTF8 takes no mail to any other name, and it would hold up
all others."""
OWNERS_GAP_S: Final = 0.1
"""Between the digests of two owners: AT_ONCE owners delay the next message by a minute, not by eight."""


class Flood(Struct, frozen=True, kw_only=True):
    """Messages that are sent as digests, one for the receiver and one for each owner."""

    rows: tuple[tuple[int, Notice], ...]
    """(number in the outbox, notice), the oldest first."""
    through: int
    """The number of the last one: what comes later is of no digest of this flood."""
    served: frozenset[str] = frozenset()
    """Addresses that have their digest; empty: the receiver itself."""


class ReceiverChannel:
    """See the module. `settings` is the configuration's."""

    topics = frozenset(Topic)
    takes_messages = False

    def __init__(self, settings: Receiver, cluster: str, places: SiteLinks = NO_LINKS, url: str = "") -> None:
        """`url`: in the place of PagerDuty's."""
        self.name = f"to-{settings.name}"
        self._settings, self._cluster, self._places, self._url = settings, cluster, places, url or PAGERDUTY
        self._mailer = Mailer(settings)
        self._flood: Flood | None = None
        """The flood of which a part is sent. A restart forgets it: its digests are sent again then."""
        self._single_through = 0
        """Up to this row no digest is made: one was refused for good."""

    async def send_due(self, outbox: Outbox, now: float) -> float | None:
        """See delivery.Channel. What comes first in the outbox is sent first: a failure is written down at that row."""
        items = outbox.pending(AT_ONCE, self.name)
        wanted = [(item, said) for item in items if (said := self._wanted(item)) is not None]
        kept = {item.id for item, _ in wanted}
        outbox.done_all(self.name, [item.id for item in items if item.id not in kept])
        if not wanted:
            return GAP_S if items else None
        item, first = wanted[0]
        if isinstance(first, Message):
            await self._send(item.id, Letter(message=first, cluster=self._cluster, event="weekly_report"), now)
            outbox.done_all(self.name, [item.id])
            return GAP_S
        flood = self._flood_of([(row.id, said) for row, said in wanted])
        if flood is not None:
            return await self._send_flood(outbox, flood, now)
        await self._send(item.id, self._letter([first]), now)
        outbox.done_all(self.name, [item.id])
        return GAP_S

    def _wanted(self, item: OutboxItem) -> Notice | Message | None:
        """What a row is to this receiver: a notice that its route lets through, a weekly report, or nothing."""
        if (weekly := words_of_row(item.payload)) is not None:
            return weekly
        notice = _notice(item)
        return notice if notice is not None and self._lets(notice) else None

    def _flood_of(self, wanted: Sequence[tuple[int, Notice | Message]]) -> Flood | None:
        """The rows that become digests, up to the first weekly report; those that a flood of which a part is sent
        began with, and no later ones. None: they are sent one by one."""
        rows = [(key, said) for key, said in takewhile(_is_notice, wanted) if isinstance(said, Notice)]
        if self._flood is not None:
            if begun := [each for each in rows if each[0] <= self._flood.through]:
                return replace(self._flood, rows=tuple(begun))
            self._flood = None
        if len(rows) <= SINGLE or self._settings.type == "pagerduty" or rows[0][0] <= self._single_through:
            return None
        return Flood(rows=tuple(rows), through=rows[-1][0])

    async def _send_flood(self, outbox: Outbox, flood: Flood, now: float) -> float:
        """One digest of a flood: first that of the receiver itself, then one for each owner with what is about his
        jobs alone. Raises SendFailed; what was sent before is not sent again. Returns the pause."""
        notices = [notice for _, notice in flood.rows]
        shares: dict[str, list[Notice]] = {}
        if self._settings.type != "email" or self._settings.to:
            shares[""] = notices
        for notice in notices:
            for address in self._owner_addresses(notice):
                shares.setdefault(address, []).append(notice)
        left = [address for address in shares if address not in flood.served]
        if left:
            address, key = left[0], f"{flood.rows[0][0]} {left[0]}"
            to = [address] if address else self._settings.to
            try:
                await self._send(key, self._letter(shares[address]), now, to)
            except SendFailed as error:
                if not error.permanent:
                    self._flood = flood
                    raise
                if not address:  # one of its notices may be why: alone, only that one is dropped
                    LOG.error("%s refuses a digest of %d messages: %s", self.name, len(notices), error.reason)
                    self._flood, self._single_through = None, flood.through
                    return GAP_S
                LOG.error("the digest of an owner's %d messages is dropped: %s", len(shares[address]), error.reason)
            flood = replace(flood, served=flood.served | {address})
        if len(left) > 1:
            self._flood = flood
            return OWNERS_GAP_S
        self._flood = None
        outbox.done_all(self.name, [key for key, _ in flood.rows])
        return GAP_S

    def _letter(self, notices: Sequence[Notice]) -> Letter:
        """Of one notice, or the digest of several."""
        if len(notices) == 1:
            return Letter(message=message_of(notices[0]), cluster=self._cluster, notice=notices[0], places=self._places)
        digest = Digest({})
        for notice in notices:
            digest.add(notice)
        return Letter(message=digest.words(), cluster=self._cluster)

    def _lets(self, notice: Notice) -> bool:
        """Whether this receiver gets it."""
        route, incident, settings = self._settings.route, notice.incident, self._settings
        is_pagerduty = settings.type == "pagerduty"
        if is_pagerduty and notice.topic is Topic.NOTED and not notice.acknowledged_by:
            return False  # it is silenced: nobody looks after it, and its alert has to say so
        only_persons = is_pagerduty if settings.only_persons is None else settings.only_persons
        ends = is_pagerduty and notice.topic in PAGERDUTY_EVENTS
        if only_persons and not (notice.needs_person or ends):
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

    async def _send(self, key: int | str, letter: Letter, now: float, to: Sequence[str] | None = None) -> None:
        """`key`: its own among the mails: the number of its row in the outbox. `to`: of a mail, who gets it; None:
        the people that its notice concerns. Raises SendFailed."""
        settings, where = self._settings, f"notify.receivers.{self._settings.name}"
        if settings.type == "email":
            owners = () if letter.notice is None else self._owner_addresses(letter.notice)
            to = [*settings.to, *owners] if to is None else list(to)
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

    def _owner_addresses(self, notice: Notice) -> list[str]:
        """The owner who gets a mail: that of what is about the jobs of one user alone."""
        if not self._settings.owner or len(notice.jobs) != len(notice.incident.job_ids):
            return []
        users = list(dict.fromkeys(job.user for job in notice.jobs))
        fit = [user for user in users if MAIL_NAME.fullmatch(user)]
        return [self._settings.owner.replace("{user}", user) for user in fit] if len(users) == 1 else []


def _is_notice(row: tuple[int, Notice | Message]) -> bool:
    return isinstance(row[1], Notice)


def _notice(item: OutboxItem) -> Notice | None:
    try:
        return from_row(item.payload)
    except msgspec.ValidationError:
        return None  # a row of another release
