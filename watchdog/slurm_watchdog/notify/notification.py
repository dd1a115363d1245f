"""What people read: one notice a piece of news, as it waits in the outbox until receivers render it, and its words: one
sentence first, the evidence under it, then what to do. Pure, and the same for all channels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from jinja2 import Environment, StrictUndefined, Template
from msgspec.structs import asdict, replace

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, one_line, plural, to_show
from slurm_watchdog.config.policy import Exceptions, values_for
from slurm_watchdog.model.actions import ActionEnd, ActionRun, Decision
from slurm_watchdog.model.headline import headline, needs_person, place, response
from slurm_watchdog.model.incidents import Culprit, Incident, Severity

KEPT = 30  # facts and culprits that are stored
KEPT_CHARS = 500  # of each sentence: no message shows more, and five thousand may wait for an unreachable Slack
TEST_SUBJECT = "test"  # of the incident that a test of the receivers sends
VALUE_LIMIT = 4000  # characters of one value in a message
SEVERITY_WORDS = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "warning", Severity.INFO: "info"}


class Topic(StrEnum):
    """What has happened to an incident."""

    OPENED = "opened"
    DIAGNOSED = "diagnosed"
    DECIDED = "decided"
    ENDED = "ended"  # an action, well or not
    RESOLVED = "resolved"
    NOTED = "noted"  # a person has silenced it


class Caller(StrEnum):
    """What started the controller: the commands that a message suggests depend on it."""

    SERVICE = "service"
    RUN = "run"
    ATTACH = "attach"


class JobNote(Struct):
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


class Notice(Struct):
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
        is_news = self.topic not in (Topic.DIAGNOSED, Topic.NOTED)
        return is_news and needs_person(self.incident, self.decision, self.end)

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
    return dict(msgspec.to_builtins(replace(notice, incident=short)))


class Site(Struct):
    """What messages say of the site: its cluster, and addresses of more about an incident where it has named any."""

    cluster: str
    external_url: str = ""  # the page, as people reach it
    runbook_url: str = ""  # with {kind} in it
    mention: str = ""  # Who is mentioned where a person is needed; with `exceptions` for some jobs.
    exceptions: Exceptions = ()

    def mention_for(self, job: JobNote | None, incident: Incident) -> str:
        """Who is mentioned for a job of an incident."""
        own, _ = values_for(self.exceptions, job, incident.kind, incident.named_nodes)
        return str(own.get("mention", self.mention))

    def page(self, incident: Incident) -> str:
        """The page of an incident."""
        return f"{self.external_url.rstrip('/')}/?incident={quote(incident.id, safe='')}" if self.external_url else ""

    def runbook(self, incident: Incident) -> str:
        """What to do about its kind."""
        return self.runbook_url.replace("{kind}", quote(incident.kind, safe=""))


class Message(NamedTuple):
    """A message in three parts. Each may contain users' text: the channel escapes it."""

    sentence: str
    evidence: tuple[str, ...] = ()
    todo: str = ""


def message_of(notice: Notice) -> Message:
    """The words for one notice."""
    incident = notice.incident
    decision = notice.decision if notice.run is None else notice.run.decision
    words = asdict(notice) | {
        "decision": decision,
        "end": notice.end,
        "over": over(incident),
        "severity": SEVERITY_WORDS[incident.severity],
        "test": "Nothing to do: this is a test" if incident.subject == TEST_SUBJECT else "",
    }
    sentence, *evidence, todo = render("notice", **words)
    return Message(sentence, tuple(evidence), todo)


@cache
def _template(name: str) -> Template:
    """Of the folder `templates`: `notice` is a sentence, evidence, a line each, and what to do; `card` has fields. Each
    value becomes one line that harms no one."""
    environment = Environment(  # noqa: S701 - not HTML: each channel escapes what it takes
        finalize=lambda value: one_line(str(value), VALUE_LIMIT), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "duration": duration, "plural": plural, "to_show": to_show, "who": culprit_line, "place": place,
    }  # fmt: skip
    return environment.from_string(Path(__file__).with_name("templates").joinpath(f"{name}.j2").read_text())


def render(template: str, **words: object) -> list[str]:
    """The lines of a template."""
    return _template(template).render(words).split("\n")[:-1]


def messages_of(story: Sequence[Notice]) -> list[Message]:
    """The messages for the notices of one incident. Its end is stated once: by the outcome of the action that ended it,
    if one did; what is equal for several processes is one message."""
    alike: dict[object, list[Notice]] = {}
    for number, notice in enumerate(story):
        decision = notice.run.decision if notice.run is not None else notice.decision
        several = decision is not None and decision.process is not None
        key = (notice.topic, notice.failed, decision and (decision.verdict, decision.by, decision.reason))
        alike.setdefault(key if several else number, []).append(notice)
    ends = {notice.end.detail for notice in story if notice.end is not None}
    found = []
    for first, *others in alike.values():
        sentence, evidence, todo = message_of(first)
        if first.topic is Topic.RESOLVED and first.incident.resolution in ends:
            sentence = over(first.incident)
        if others:
            sentence += f"; the same of {len(others):,} more process{'es' if len(others) > 1 else ''}"
        found.append(Message(sentence, (*evidence, *(message_of(each).sentence for each in others)), todo))
    return found


def over(incident: Incident) -> str:
    """`over after 12 min`."""
    lasted_s = None if incident.resolved_at is None else max(0.0, incident.resolved_at - incident.opened_at)
    return "over" if lasted_s is None else f"over after {duration(lasted_s)}"


def culprit_line(culprit: Culprit) -> str:
    """Who is named, and why: `rank 3 on n1 pid 42: the only one in forward`."""
    parts = (("rank", culprit.rank), ("on", culprit.node), ("pid", culprit.pid), ("", culprit.gpu_uuid))
    places = (*parts, ("at", culprit.path or culprit.mount))
    named = " ".join(f"{what} {value}".strip() for what, value in places if value not in (None, ""))
    return f"{named}: {culprit.reason}" if culprit.reason else named
