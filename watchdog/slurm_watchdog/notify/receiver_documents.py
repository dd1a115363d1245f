"""What receivers of `notify.receivers` are sent: PagerDuty's events, Teams' cards, a site's own JSON, mails. Pure.

Text of users gets into values only: no placeholder can make a document another one, and Teams' text runs and mails
have no markup.
"""

from __future__ import annotations

import hashlib
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any, Final

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import one_line
from slurm_watchdog.notify.links import SiteLinks
from slurm_watchdog.notify.notification import Notice, Topic
from slurm_watchdog.notify.wording import Message

TEXT_LIMIT: Final = 1000
"""PagerDuty takes 1,024 characters of a summary: https://developer.pagerduty.com/docs/ZG9jOjExMDI5NTgx-send-an-alert-event"""
DETAILS: Final = 20
SUBJECT_LIMIT: Final = 250
"""Characters: a weekly report's whole sentence is about 200."""
PAGERDUTY: Final = "https://events.pagerduty.com/v2/enqueue"
PAGERDUTY_EVENTS: Final = {Topic.RESOLVED: "resolve", Topic.NOTED: "acknowledge"}
"""All other topics trigger: an alert of the same key is one alert."""


class Letter(Struct, frozen=True, kw_only=True):
    """One message, of one notice or a digest of many."""

    message: Message
    cluster: str
    notice: Notice | None = None
    places: SiteLinks = SiteLinks()
    event: str = "digest"
    """What it is where it is about no notice."""

    @property
    def text(self) -> str:
        """The sentence, in one line."""
        return one_line(f"[{self.cluster}] {self.message.sentence}", TEXT_LIMIT)

    @property
    def details(self) -> list[str]:
        """The evidence, a line each."""
        return [one_line(each, TEXT_LIMIT) for each in self.message.evidence[:DETAILS]]

    @property
    def link(self) -> str:
        """Its page; empty where the site has named no address."""
        return "" if self.notice is None else self.places.incident_url(self.notice.incident.id)

    def values(self) -> dict[str, str]:
        """For the placeholders of a template."""
        notice, jobs = self.notice, () if self.notice is None else self.notice.jobs

        def joined(name: str) -> str:
            return ", ".join(dict.fromkeys(filter(None, (one_line(getattr(job, name), 200) for job in jobs))))

        return {
            "text": self.text,
            "details": "\n".join(self.details),
            "todo": one_line(self.message.todo, TEXT_LIMIT),
            "event": self.event if notice is None else notice.topic.value,
            "severity": "" if notice is None else notice.incident.severity.value,
            "kind": "" if notice is None else notice.incident.kind,
            "incident": "" if notice is None else notice.incident.id,
            "jobs": "" if notice is None else ", ".join(notice.incident.job_ids[:8]),
            "users": joined("user"),
            "partitions": joined("partition"),
            "accounts": joined("account"),
            "cluster": self.cluster,
            "link": self.link,
            "runbook": "" if notice is None else self.places.runbook(notice.incident.kind),
        }


def pagerduty(letter: Letter, key: str) -> dict[str, Any]:
    """An event of its Events API v2, by its published schema: https://github.com/PagerDuty/api-schema, events-v2."""
    notice = letter.notice
    assert notice is not None
    incident = notice.incident
    payload = {
        "summary": letter.text,
        "source": letter.cluster,
        "severity": incident.severity.value,
        "class": incident.kind,
        "custom_details": {
            "evidence": letter.details,
            "next": letter.values()["todo"],
            "jobs": letter.values()["jobs"],
        },
    }
    event: dict[str, Any] = {
        "routing_key": key,
        "event_action": PAGERDUTY_EVENTS.get(notice.topic, "trigger"),
        "dedup_key": f"slurm-watchdog/{letter.cluster}/{incident.id}",
        "payload": payload,
    }
    return event | ({"links": [{"href": letter.link, "text": "Incident"}]} if letter.link else {})


def teams(letter: Letter) -> dict[str, Any]:
    """A card for a workflow's webhook: runs of text, in which nothing is markup."""
    lines = [letter.text, *letter.details, letter.values()["todo"]]
    body = [
        {
            "type": "RichTextBlock",
            "inlines": [{"type": "TextRun", "text": line, "weight": "Bolder" if first else "Default"}],
        }
        for first, line in zip((True, *[False] * len(lines)), lines, strict=False)
        if line
    ]
    actions = [{"type": "Action.OpenUrl", "title": "Incident", "url": letter.link}] if letter.link else []
    card = {"$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
            "body": body, "actions": actions}  # fmt: skip
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


def mail(letter: Letter, sender: str, to: list[str], at: float) -> EmailMessage:
    """A mail in plain text. `at` is a date."""
    found = EmailMessage()
    found["From"], found["To"], found["Date"] = sender, ", ".join(to), formatdate(at)
    found["Message-ID"] = _message_id(letter, sender, to, at)
    found["Subject"] = one_line(letter.text, SUBJECT_LIMIT).replace("=?", "= ?")  # which would begin an encoded word
    found["Auto-Submitted"] = "auto-generated"  # RFC 3834: no answer of a vacation
    values = letter.values()
    about = [
        f"{name}: {values[name]}" for name in ("jobs", "users", "kind", "incident", "link", "runbook") if values[name]
    ]
    found.set_content(
        "\n\n".join(filter(None, [letter.text, "\n".join(letter.details), values["todo"], "\n".join(about)]))
    )
    return found


def _message_id(letter: Letter, sender: str, to: list[str], at: float) -> str:
    """What filters of spam miss where a mail has none, and servers add only to mails of their own machine."""
    of = hashlib.sha256("\0".join((letter.text, *to, repr(at))).encode(errors="replace")).hexdigest()
    return f"<{of[:32]}@{sender.rpartition('@')[2] or 'localhost'}>"
