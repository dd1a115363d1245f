"""Slack messages as Block Kit documents. Pure.

Names of jobs, paths and log lines come from users: they are escaped, bounded, stripped of control characters
and put into plain text, where nothing is a link or mentions anybody. The blocks that are no plain text hold
ids and addresses of the configuration only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final

from msgspec.structs import replace
from slack_sdk.models.blocks import (
    ContextBlock,
    HeaderBlock,
    MarkdownTextObject,
    PlainTextObject,
    SectionBlock,
)

from slurm_watchdog.base.text import cut, duration, plural, safe
from slurm_watchdog.model.incidents import Incident, Severity
from slurm_watchdog.notify.notification import NO_LINKS, Notice, SiteLinks, Topic
from slurm_watchdog.notify.wording import (
    ACTION_PARTICIPLES,
    Message,
    duration_suffix,
    group_alike,
    joint_message,
    message_of,
    next_step,
    opened_message,
    with_subject,
)

SENTENCE_LIMIT = 600
LINE_LIMIT = 300
BLOCK_LIMIT = 2900
"""Slack takes 3000 characters in one block of text; all blocks of a message together may have some 10,000,
which it documents nowhere (slackapi/bolt-js#2867): three of ours are below that."""
FACT_LIMIT = 12
HEADER_LIMIT: Final = 150
"""https://docs.slack.dev/reference/block-kit/blocks/header-block"""
FIELD_LIMIT: Final = 300
"""Slack takes 2,000 in each of ten: https://docs.slack.dev/reference/block-kit/blocks/section-block"""
MENTIONED_GPU_HOURS: Final = 0.01
MARKS: Final = {
    Severity.CRITICAL: "\N{LARGE RED CIRCLE}",
    Severity.WARNING: "\N{LARGE YELLOW CIRCLE}",
    Severity.INFO: "\N{LARGE BLUE CIRCLE}",
}
MARKS_OVER: Final = "\N{LARGE GREEN CIRCLE}"

Payload = dict[str, Any]


@dataclass(frozen=True)
class Top:
    """Header and fields above the sentences of a message about an incident."""

    header: str
    fields: tuple[tuple[str, str], ...]
    """(name, value); names are ours."""
    cluster: str


def parent(
    story: Sequence[Notice],
    cluster: str,
    mentions: Mapping[str, str],
    *,
    whole: bool,
    places: SiteLinks = NO_LINKS,
) -> Payload:
    """The message in the channel for an incident: its first sentence, and the decisions so far.

    `whole`: with the evidence of everything in `story`; otherwise that follows in the thread. `mentions` is
    the configuration's.
    """
    said = messages_of(story)
    evidence = [line for each in said for line in each.evidence] if whole else []
    return payload(
        [each.sentence for each in said],
        evidence,
        said[-1].todo,
        wanted(story, mentions),
        top=top(story, cluster),
        links=links(story[0], places),
    )


def messages_of(story: Sequence[Notice]) -> list[Message]:
    """The messages for the notices. The end of an incident is stated once: by the outcome of the action that
    ended it, if one did; what is equal for several processes is one message."""
    details = {notice.run.end.detail for notice in story if notice.run is not None and notice.run.end is not None}
    return [
        replace(message_of(notices[0]), sentence=f"over{duration_suffix(notices[0].incident)}")
        if notices[0].topic is Topic.RESOLVED and notices[0].incident.resolution in details
        else joint_message(notices)
        for notices in group_alike(story)
    ]


def top(story: Sequence[Notice], cluster: str) -> Top:
    """Header and fields for an incident after all that is in `story`."""
    first, last = story[0], story[-1]
    incident = last.incident
    over = next((each for each in story if each.topic is Topic.RESOLVED), None)
    lasted_s = (incident.resolved_at or last.at) - incident.opened_at
    state = "over" if over is not None else _state(story)
    mark = MARKS_OVER if over is not None else MARKS[incident.severity]
    jobs = [f"{job.job_id} {job.name}".strip() for job in first.jobs] or list(incident.job_ids[:5])
    owners = dict.fromkeys(
        f"{job.user}{f', partition {job.partition}' if job.partition else ''}" for job in first.jobs if job.user
    )
    gpus = sum(job.gpus for job in first.jobs)
    fields = [
        ("Cluster", cluster),
        ("Job" if len(jobs) == 1 else "Jobs", ", ".join(jobs)),
        ("Owner", "; ".join(owners)),
        ("Where", _where(incident)),
        ("Lasted" if over is not None else "Since", _since(incident, lasted_s, over=over is not None)),
        ("Lost" if over is not None else "Lost so far", _gpu_hours(gpus, lasted_s)),
    ]
    return Top(
        header=f"{mark} {_headline(incident)}{f' ({state})' if state else ''}",
        fields=tuple((name, value) for name, value in fields if value),
        cluster=cluster,
    )


def _headline(incident: Incident) -> str:
    """The first clause of what is wrong, without its brackets: `Rank 2 on n3 of job 4711 is stopped`."""
    text = re.sub(r"\(pid \d+ on (\S+?)\)", r"on \1", incident.summary)
    while (shorter := re.sub(r"\s*\([^()]*\)", "", text)) != text:
        text = shorter
    return with_subject(incident, re.split(r"[:;]\s|\.(?:\s|$)", text, maxsplit=1)[0])


def _state(story: Sequence[Notice]) -> str:
    """State of the response, for the header; empty before the first decision."""
    if any(notice.needs_person for notice in story[-1:]):
        return "needs a person"
    newest = next((each for each in reversed(story) if each.topic in (Topic.DECIDED, Topic.ENDED)), None)
    if newest is None or newest.topic is Topic.ENDED or newest.decision is None:
        return ""
    return f"{ACTION_PARTICIPLES.get(newest.decision.action, 'action')}: under way" if newest.decision.acts else ""


def _where(incident: Incident) -> str:
    """The first of those that are identified as the cause: rank, node, GPU."""
    if not incident.culprits:
        return ""
    first = incident.culprits[0]
    parts = [
        f"rank {first.rank}" if first.rank is not None else "",
        f"node {first.node}" if first.node else "",
        first.gpu_uuid or "",
        first.path or first.mount or "",
    ]
    more = f" and {len(incident.culprits) - 1} more" if len(incident.culprits) > 1 else ""
    return " · ".join(part for part in parts if part) + more


def _since(incident: Incident, lasted_s: float, *, over: bool) -> str:
    if over:
        return duration(max(0.0, lasted_s))
    noticed = incident.detected_after_s
    began = datetime.fromtimestamp(incident.opened_at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{began}{f', noticed after {duration(noticed)}' if noticed else ''}"


def _gpu_hours(gpus: int, lasted_s: float) -> str:
    """GPU hours lost so far; empty where the number of GPUs is unknown."""
    hours = gpus * max(0.0, lasted_s) / 3600.0
    shown = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    return f"about {shown} GPU hours ({plural(gpus, 'GPU')})" if hours >= MENTIONED_GPU_HOURS else ""


def links(notice: Notice, places: SiteLinks) -> list[tuple[str, str]]:
    """(address, words) of where to read more: the page, the runbook; nothing where the site has named no address."""
    incident = notice.incident
    page, runbook = places.incident_url(incident.id), places.runbook(incident.kind)
    return [*([(page, "Incident")] if page else []), *([(runbook, "Runbook")] if runbook else [])]


def updated(story: Sequence[Notice], cluster: str, places: SiteLinks) -> Payload:
    """The updated parent message after the news in `story`."""
    first, incident = story[0], story[0].incident
    news = [each.sentence for each in messages_of([n for n in story if n.topic in (Topic.DECIDED, Topic.ENDED)])]
    return payload(
        [opened_message(incident).sentence, *news[-3:]],
        [],
        next_step(incident, "What happened: {}"),
        (),
        top=top(story, cluster),
        links=links(first, places),
    )


def reply(story: Sequence[Notice], mentions: Mapping[str, str], *, first: bool) -> Payload:
    """A reply in the thread of an incident; `first`: the parent message already has the first notice's sentence."""
    said = messages_of(story)
    evidence = [line for each in said for line in each.evidence]
    if first:
        sentences = [each.sentence for each in said[1:]] or ["Evidence"]
        return payload(sentences, evidence, said[-1].todo, ())
    return payload([each.sentence for each in said], evidence, said[-1].todo, wanted(story, mentions))


def has_evidence(story: Sequence[Notice]) -> bool:
    """Whether a notice has evidence, which a parent message leaves to the thread."""
    return any(message_of(notice).evidence for notice in story)


def closed(notice: Notice, cluster: str, places: SiteLinks = NO_LINKS) -> Payload:
    """The parent message of a resolved incident."""
    incident = notice.incident
    return payload(
        [f"over{duration_suffix(incident)}: {with_subject(incident, incident.summary)}"],
        [incident.resolution],
        next_step(incident, "What happened: {}"),
        (),
        top=top([notice], cluster),
        links=links(notice, places),
    )


def wanted(story: Sequence[Notice], mentions: Mapping[str, str]) -> tuple[str, ...]:
    """Ids to mention by the configuration, if a person is needed; at most five."""
    if not mentions or not any(notice.needs_person for notice in story):
        return ()
    keys = [f"{what}:{name}" for n in story for job in n.jobs for what, name in (("user", job.user), ("partition",
        job.partition))]  # fmt: skip
    found = [mentions[key] for key in keys if key in mentions] or [mentions.get("default", "")]
    return tuple(dict.fromkeys(each for each in found if each))[:5]


def payload(
    sentences: Sequence[str],
    evidence: Sequence[str],
    todo: str,
    mention: Sequence[str] = (),
    *,
    top: Top | None = None,
    links: Sequence[tuple[str, str]] = (),
) -> Payload:
    """A message: header and fields if it has a `top`, sentences, evidence, what to do, links. Every text is
    made harmless here."""
    head = [safe(sentence, SENTENCE_LIMIT) for sentence in sentences[:4]]
    blocks = [] if top is None else [header(top.header), *fields(top.fields)]
    blocks.append(section("\n".join(head)))
    lines = [f"• {safe(line, LINE_LIMIT)}" for line in evidence[:FACT_LIMIT] if line.strip()]
    left_out = len(evidence) - FACT_LIMIT
    while sum(len(line) + 1 for line in lines) > BLOCK_LIMIT - 40:
        lines.pop()
        left_out = max(0, left_out) + 1
    if left_out > 0:
        lines.append(f"• and {left_out} more")
    if lines:
        blocks.append(section("\n".join(lines)))
    if todo:
        blocks.append(section(safe(todo, SENTENCE_LIMIT)))
    if links:
        blocks.append(link_block(links))
    if mention:
        blocks.append(mention_block(mention))
    prefix = "" if top is None else f"[{safe(top.cluster, LINE_LIMIT)}] "
    return message(prefix + _running(head), blocks)


def _running(sentences: Sequence[str]) -> str:
    """Sentences one behind the other, each but the last with its stop, each but the first with a capital."""
    last = len(sentences) - 1
    return " ".join(
        (each if at == 0 else each[:1].upper() + each[1:])
        + ("" if at == last or each.endswith((".", "!", "?", "…", ":")) else ".")
        for at, each in enumerate(sentences)
    )


def header(text: str) -> Payload:
    """The headline: plain text that no user can make longer than Slack takes."""
    return HeaderBlock(text=PlainTextObject(text=safe(text, HEADER_LIMIT), emoji=False)).to_dict()


def fields(pairs: Sequence[tuple[str, str]]) -> list[Payload]:
    """A block with two columns of names and values; none for no pairs."""
    shown = [PlainTextObject(text=f"{name}\n{safe(value, FIELD_LIMIT)}", emoji=False) for name, value in pairs[:10]]
    return [SectionBlock(fields=shown).to_dict()] if shown else []


def link_block(links: Sequence[tuple[str, str]]) -> Payload:
    """Addresses of the configuration, which has checked them, with ids of ours in them; words of ours."""
    words = " · ".join(f"<{address.replace('&', '&amp;')}|{name}>" for address, name in links)
    return ContextBlock(elements=[MarkdownTextObject(text=words, verbatim=True)]).to_dict()


def message(text: str, blocks: Sequence[Payload]) -> Payload:
    """`text` is what a phone shows; it is harmless already, and so are the blocks."""
    return {
        "text": cut(text, 2 * SENTENCE_LIMIT),
        "blocks": list(blocks),
        "link_names": False,
        "unfurl_links": False,
        "unfurl_media": False,
    }


def section(text: str) -> Payload:
    """A block of plain text."""
    return SectionBlock(text=PlainTextObject(text=text or "-", emoji=False)).to_dict()


def mention_block(ids: Sequence[str]) -> Payload:
    """The block that calls people: ids of the configuration, which has checked them."""
    words = [
        f"<!{each}>" if each in ("here", "channel") else f"<!subteam^{each}>" if each.startswith("S") else f"<@{each}>"
        for each in ids
    ]
    return SectionBlock(text=MarkdownTextObject(text=" ".join(words), verbatim=True)).to_dict()
