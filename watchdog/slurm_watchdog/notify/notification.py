"""Notification records as stored in the outbox; rendered to text on delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.actions import RESTARTING, ActionRun, Decision
from slurm_watchdog.model.incidents import Incident, Severity
from slurm_watchdog.model.slurm import SlurmJob

KEPT_FACTS = 30
KEPT_CULPRITS = 30
KEPT_CHARS = 500
"""Characters of each stored sentence: no message shows more, and five thousand incidents may wait for an
unreachable Slack."""
BUSY = frozenset({"busy", RESTARTING})
"""What a decision is by that leaves the job to an action that is under way already."""
TRANSIENT_GUARDS = frozenset({"blind", "evidence", *BUSY})
"""Guards that usually hold for seconds only: until Slurm answers again, until the stacks are collected, or
while another action of the job, which ends this incident too, is under way."""
KEPT_JOBS = 8
"""Jobs of one incident that are stored with it."""


TEST_SUBJECT = "test"
"""Subject of the incident that `notify test` sends."""


class Topic(StrEnum):
    """What has happened to an incident."""

    OPENED = "opened"
    DIAGNOSED = "diagnosed"
    DECIDED = "decided"
    ENDED = "ended"
    """An action, well or not."""
    RESOLVED = "resolved"
    NOTED = "noted"
    """A person has silenced it."""


class Caller(StrEnum):
    """What started the controller: the commands that a message suggests depend on it."""

    SERVICE = "service"
    RUN = "run"
    ATTACH = "attach"


class JobNote(Struct, frozen=True, kw_only=True):
    """Whose a job is."""

    job_id: str
    user: str = ""
    partition: str = ""
    account: str = ""
    name: str = ""
    gpus: int = 0
    """0: not known."""


class Notice(Struct, frozen=True, kw_only=True):
    """One notification."""

    topic: Topic
    at: float
    """Date."""
    incident: Incident
    decision: Decision | None = None
    run: ActionRun | None = None
    said: tuple[str, ...] = ()
    """Findings of a diagnosis, a sentence each."""
    jobs: tuple[JobNote, ...] = ()
    caller: Caller = Caller.SERVICE

    @property
    def needs_person(self) -> bool:
        """Whether a person has to respond to a critical incident: an action has failed, or none is done."""
        critical = self.incident.severity is Severity.CRITICAL
        if self.topic is Topic.OPENED:
            return critical and not self.incident.job_ids  # nothing is done about it, and so nothing more is said
        if self.topic is Topic.DECIDED and self.decision is not None:
            decision = self.decision
            return critical and not decision.acts and decision.by not in BUSY
        return self.urgent

    @property
    def urgent(self) -> bool:
        """Whether an action has failed, so that a person has to respond."""
        end = self.run.end if self.run is not None else None
        return end is not None and not end.ok and not end.needless


def to_row(notice: Notice) -> dict[str, Any]:
    """The notice as a plain document of bounded size."""
    incident = notice.incident
    short = replace(
        incident,
        summary=incident.summary[:KEPT_CHARS],
        resolution=incident.resolution[:KEPT_CHARS],
        facts=tuple(fact[:KEPT_CHARS] for fact in incident.facts[:KEPT_FACTS]),
        culprits=incident.culprits[:KEPT_CULPRITS],
        processes=(),
    )
    row: dict[str, Any] = msgspec.to_builtins(replace(notice, incident=short))
    return row


def from_row(row: dict[str, Any]) -> Notice:
    """The notice of such a document. Raises msgspec.ValidationError for any other."""
    return msgspec.convert(row, Notice)


def job_notes(jobs: Iterable[SlurmJob | None], gpus_of: Callable[[str], int] = lambda job_id: 0) -> tuple[JobNote, ...]:
    """Whose these jobs are, and how many GPUs wait with them; of those that are not known nothing is said."""
    return tuple(
        JobNote(
            job_id=job.job_id,
            user=job.user,
            partition=job.partition,
            account=job.account,
            name=job.name,
            gpus=gpus_of(job.job_id),
        )
        for job in jobs
        if job is not None
    )


class SiteLinks(Struct, frozen=True, kw_only=True):
    """Addresses of one site for messages: an incident on the page, and what the site has written about its kind; an
    empty address gives no links."""

    external_url: str = ""
    """The page, as people reach it."""
    runbook_url: str = ""
    """With {kind} in it."""

    def incident_url(self, incident_id: str) -> str:
        """The page of an incident."""
        return f"{self.external_url.rstrip('/')}/#/incident/{quote(incident_id, safe='')}" if self.external_url else ""

    def runbook(self, kind: str) -> str:
        """What to do about a kind of incident."""
        return self.runbook_url.replace("{kind}", quote(kind, safe=""))


NO_LINKS: Final = SiteLinks()
