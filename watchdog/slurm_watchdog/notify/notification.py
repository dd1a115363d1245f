"""What people are told: one notice a piece of news, as it waits in the outbox until receivers render it. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.exceptions import Exceptions, values_for
from slurm_watchdog.model.actions import ActionEnd, ActionRun, Decision
from slurm_watchdog.model.headline import BUSY, headline, needs_person, response
from slurm_watchdog.model.incidents import Incident

KEPT = 30  # facts and culprits that are stored
KEPT_CHARS = 500  # of each sentence: no message shows more, and five thousand may wait for an unreachable Slack
KEPT_JOBS = 8
TRANSIENT_GUARDS = frozenset({"blind", "evidence", *BUSY})
"""Guards that usually hold for seconds only: until Slurm answers again, until the stacks are collected, or
while another action of the job, which ends this incident too, is under way."""
TEST_SUBJECT = "test"  # of the incident that a test of the receivers sends


class Topic(StrEnum):
    """What has happened to an incident."""

    OPENED = "opened"
    DIAGNOSED = "diagnosed"
    DECIDED = "decided"
    ENDED = "ended"  # an action, well or not
    RESOLVED = "resolved"
    NOTED = "noted"  # a person has silenced it


CALLS = frozenset({Topic.OPENED, Topic.DECIDED, Topic.ENDED})
"""News that may call a person: of an incident without a job nothing is decided."""


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
    gpus: int = 0  # 0: not known

    @property
    def words(self) -> str:
        """`4711 llm of ann in gpu`."""
        parts = (("", self.job_id), ("", self.name), ("of", self.user), ("in", self.partition))
        return " ".join(f"{word} {name}".strip() for word, name in parts if name)


class Notice(Struct, frozen=True, kw_only=True):
    """One notification."""

    topic: Topic
    at: float  # date
    incident: Incident
    decision: Decision | None = None
    run: ActionRun | None = None
    said: tuple[str, ...] = ()
    """Findings of a diagnosis, a sentence each; what a person has done."""
    jobs: tuple[JobNote, ...] = ()
    caller: Caller = Caller.SERVICE
    acted_on: bool = False  # an action on the incident is under way

    @property
    def needs_person(self) -> bool:
        """Whether a person has to act, and this is the news that says so."""
        return self.topic in CALLS and needs_person(self.incident, self.decision, self.end)

    @property
    def headline(self) -> str:
        """Rank, node, what is wrong, what is done about it."""
        decision = self.decision if self.run is None else self.run.decision
        done = response(self.incident, decision, self.end)
        return headline(self.incident, done or ("an action is under way" if self.acted_on else ""))

    @property
    def failed(self) -> bool:
        """Whether an action has failed."""
        return self.end is not None and self.end.outcome == "failed"

    @property
    def end(self) -> ActionEnd | None:
        """How the action ended."""
        return None if self.run is None else self.run.end


def to_row(notice: Notice) -> dict[str, Any]:
    """The notice as a plain document of bounded size."""
    incident = notice.incident
    short = replace(
        incident,
        summary=incident.summary[:KEPT_CHARS],
        resolution=incident.resolution[:KEPT_CHARS],
        facts=tuple(fact[:KEPT_CHARS] for fact in incident.facts[:KEPT]),
        culprits=incident.culprits[:KEPT],
        processes=(),
    )
    row: dict[str, Any] = msgspec.to_builtins(replace(notice, incident=short))
    return row


def from_row(row: dict[str, Any]) -> Notice:
    """The notice of such a document. Raises msgspec.ValidationError for any other."""
    return msgspec.convert(row, Notice)


class Site(Struct, frozen=True, kw_only=True):
    """What messages say of the site: its cluster, and addresses of more about an incident where it has named any."""

    cluster: str
    external_url: str = ""  # the page, as people reach it
    runbook_url: str = ""  # with {kind} in it

    mention: str = ""  # Who is mentioned where a person is needed; with `exceptions` for some jobs.
    exceptions: Exceptions = ()

    def mention_for(self, job: JobNote | None, incident: Incident) -> str:
        """Who is mentioned for a job of an incident."""
        own, _ = values_for(self.exceptions, job, incident.kind, incident.named_nodes)
        found: str = own.get("mention", self.mention)
        return found

    def page(self, incident: Incident) -> str:
        """The page of an incident."""
        return f"{self.external_url.rstrip('/')}/?incident={quote(incident.id, safe='')}" if self.external_url else ""

    def runbook(self, incident: Incident) -> str:
        """What to do about its kind."""
        return self.runbook_url.replace("{kind}", quote(incident.kind, safe=""))
