"""The list `notify.receivers` of the configuration: receivers of several types, each with the incidents it gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal

from pydantic import Field

from slurm_watchdog.base.hours import newest_start
from slurm_watchdog.config.job_match import Globs
from slurm_watchdog.config.types import Section, Span, file_problems, split_address
from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.knowledge.message_templates import PLACEHOLDERS, unknown_placeholders

ReceiverType = Literal["pagerduty", "teams", "template", "email"]
NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "pagerduty": ("key_file",),
    "teams": ("url_file",),
    "template": ("url_file", "template"),
    "email": ("server", "sender"),
}
"""What each type cannot be without."""
MAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,190}")


def weekly_problems(when: str, where: str) -> Iterator[str]:
    """What is wrong with a time of the week; empty is none."""
    try:
        if when:
            newest_start(when, 0.0)
    except ValueError:
        yield f"{where}: must be a day and a time such as 'mon 09:00', got {when!r}"


class Route(Section):
    """Which incidents a receiver gets; what is left out lets all through, and all that is given has to match."""

    severity: list[Literal["info", "warning", "critical"]] = Field([], description="Any of these.")
    kinds: list[str] = Field([], description="Any of these kinds.")
    partition: Globs = Field([], description="Of one of its jobs: names or globs.")
    account: Globs = Field([], description="Of one of its jobs.")
    user: Globs = Field([], description="Owner of one of its jobs.")

    def problems(self) -> Iterator[str]:
        for kind in self.kinds:
            if kind not in KINDS:
                yield f"kinds: {kind[:60]!r} is no kind of incident; known: {', '.join(KINDS)}"


class Receiver(Section):
    """One receiver."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9-]{0,23}$", description="Names its messages in the outbox, metrics, status."
    )
    type: ReceiverType = Field(description="pagerduty, teams, template (your own JSON) or email.")
    route: Route = Field(Route(), description="Which incidents it gets.")
    only_persons: bool | None = Field(
        None,
        description="Only what needs a person: a critical incident about which nothing is done, an action that failed; "
        "as pagerduty does if nothing is said.",
    )
    key_file: str = Field("", description="pagerduty: a file with the integration key (Events API v2).")
    url_file: str = Field(
        "",
        description="teams, template: a file with the address, which may be a secret; pagerduty: of another one than "
        "https://events.pagerduty.com/v2/enqueue, such as that for accounts in the EU.",
    )
    token_file: str = Field("", description="template: a file with a token that goes along as a bearer.")
    template: Any = Field(None, description="template: the JSON to send, with {text} and others in its strings.")
    server: str = Field("", description="email: HOST:PORT of the SMTP server.")
    encryption: Literal["starttls", "tls", "none"] = Field("starttls", description="email: none on this machine only.")
    ca_file: str = Field("", description="email: a file with the CA of its certificate (PEM); empty = the system's.")
    login: str = Field("", description="email: user name at the server; empty = none is asked for.")
    password_file: str = Field("", description="email: a file with its password.")
    sender: str = Field("", description="email: its From.")
    to: list[str] = Field([], description="email: addresses that get all of it.")
    owner: str = Field(
        "", description="email: the address of a job's owner, such as '{user}@example.org', who gets his."
    )
    weekly_report: str = Field(
        "",
        description="When to send what the jobs of its route's partitions, accounts and users did in the last seven "
        "days, such as 'mon 09:00'; not to pagerduty.",
    )
    deadline: Span = Field(10.0, description="For one message.")

    def problems(self) -> Iterator[str]:
        for name in NEEDED[self.type]:
            if not getattr(self, name):
                yield f"{name}: required by type: {self.type}"
        for name in ("key_file", "url_file", "token_file", "password_file"):
            yield from file_problems(getattr(self, name), name)
        for name in sorted(unknown_placeholders(self.template)):
            yield f"template: {{{name[:40]}}} is not known; known: {', '.join(PLACEHOLDERS)}"
        yield from weekly_problems(self.weekly_report, "weekly_report")
        if self.weekly_report and (self.type == "pagerduty" or (self.type == "email" and not self.to)):
            yield "weekly_report: to an address in `to`, and not to pagerduty, which is for what is wrong now"
        if self.type == "email":
            yield from self._mail_problems()

    def _mail_problems(self) -> Iterator[str]:
        host, port = split_address(self.server)
        if self.server and not port:
            yield f"server: must be HOST:PORT such as smtp.example.org:587, got {self.server!r}"
        if self.encryption == "none" and (host not in ("127.0.0.1", "::1", "localhost") or self.login):
            yield "encryption: none is for a server on this machine, without login"
        if bool(self.login) != bool(self.password_file):
            yield "password_file: goes with login"
        if not (self.to or self.owner):
            yield "to: name who gets the mails, or owner"
        for address in (self.sender, *self.to, self.owner.replace("{user}", "ann")):
            if address and not MAIL.fullmatch(address):
                yield f"to: {address[:80]!r} is no mail address"
