"""The wording of notifications: one sentence first, the evidence under it, then what to do. Pure, and the
same for all channels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from msgspec.structs import asdict

from slurm_watchdog.base.text import duration, one_line, plural, to_show
from slurm_watchdog.model.actions import Action
from slurm_watchdog.model.incidents import Culprit, Incident, Severity
from slurm_watchdog.notify.notification import TEST_SUBJECT, TRANSIENT_GUARDS, Notice, Topic

VALUE_LIMIT = 4000  # characters of one value in a message
SEVERITY_WORDS = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "warning", Severity.INFO: "info"}
DONE = {
    Action.REQUEUE: "requeued",
    Action.GRACEFUL_RESTART: "restarted gracefully",
    Action.RESTART_STEP: "restarted in its allocation",
    Action.RESUBMIT: "ended and submitted again",
    Action.LEAVE_TO_CHAIN: "ended for the next of its chain",
    Action.CANCEL: "cancelled",
    Action.ASK_TO_SAVE: "asked to save",
    Action.HOLD: "held",
    Action.END_PROCESS: "ended",
}
"""Past participle of each action, as in "job 7 was requeued"."""


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
        "done": decision and DONE.get(decision.action, "requeued"),
        "transient": decision and decision.by in TRANSIENT_GUARDS,
        "over": over(incident),
        "severity": SEVERITY_WORDS[incident.severity],
        "test": "Nothing to do: this is a test" if incident.subject == TEST_SUBJECT else "",
    }
    sentence, *evidence, todo = render("notice", **words)
    return Message(sentence, tuple(evidence), todo)


@cache
def _template(name: str) -> Template:
    """Of the folder `templates`: `notice` is a sentence, evidence, a line each, and what to do; `card` has fields. Each
    value becomes one line that harms nobody."""
    environment = Environment(  # noqa: S701 - not HTML: each channel escapes what it takes
        finalize=lambda value: one_line(str(value), VALUE_LIMIT), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "duration": duration, "plural": plural, "to_show": to_show,
        "of": with_jobs, "who": culprit_line, "named": named,
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


def with_jobs(text: str, incident: Incident) -> str:
    """`text`, with the jobs before it unless it names the one."""
    jobs = incident.job_ids
    if not jobs or (len(jobs) == 1 and re.search(rf"\bjob {re.escape(jobs[0])}\b", text, re.IGNORECASE)):
        return text
    more = " and more" if len(jobs) > 5 else ""
    return f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs[:5])}{more}: {text}"


def named(culprit: Culprit) -> str:
    """Who is named: `rank 3 on n1 pid 42`."""
    parts = (("rank", culprit.rank), ("on", culprit.node), ("pid", culprit.pid), ("", culprit.gpu_uuid))
    places = (*parts, ("at", culprit.path or culprit.mount))
    return " ".join(f"{what} {value}".strip() for what, value in places if value not in (None, ""))


def culprit_line(culprit: Culprit) -> str:
    """Who is named, and why."""
    return f"{named(culprit)}: {culprit.reason}" if culprit.reason else named(culprit)
