"""How messages look in Slack. Pure: values in, the document that Slack takes out.

Names of jobs, paths and log lines come from users: they are escaped, bounded, stripped of control characters and put into plain
text, where nothing is a link or mentions anybody. The one block that is no plain text holds ids of the configuration only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from watchdog.notify.harmless import cut, plural, safe
from watchdog.notify.notice import Notice, Topic
from watchdog.notify.places import NOWHERE, Places
from watchdog.notify.words import Said, about, lasted, next_step, say, say_opened

SENTENCE_LIMIT = 600
LINE_LIMIT = 300
BLOCK_LIMIT = 2900
"""Slack takes 3000 characters in one block of text; all blocks of a message together may have some 10,000, which it documents nowhere
(slackapi/bolt-js#2867): three of ours are below that."""
FACT_LIMIT = 12

Payload = dict[str, Any]


def parent(
    story: Sequence[Notice],
    cluster: str,
    mentions: Mapping[str, str],
    *,
    whole: bool,
    places: Places = NOWHERE,
) -> Payload:
    """The message that stands in the channel for an incident: its first sentence, and what was decided meanwhile.

    `whole`: with the evidence of everything in `story`; otherwise that follows in the thread. `mentions` is the configuration's.
    """
    said = [say(notice) for notice in story]
    evidence = [line for each in said for line in each.evidence] if whole else owners(story[0])
    return payload(
        [_headed(said[0].sentence, cluster), *(each.sentence for each in said[1:])],
        [*evidence, *links(story[0], places)],
        said[-1].todo,
        wanted(story, mentions),
    )


def links(notice: Notice, places: Places) -> list[str]:
    """Where to read more: the page, the runbook; nothing where the site has named no address."""
    incident = notice.incident
    page, runbook = places.of_incident(incident.id), places.runbook(incident.kind)
    return [*([f"Page: {page}"] if page else []), *([f"Runbook: {runbook}"] if runbook else [])]


def updated(story: Sequence[Notice], cluster: str, places: Places) -> Payload:
    """The parent as it is to be from now on, after the news in `story`."""
    first, incident = story[0], story[0].incident
    news = [say(notice).sentence for notice in story if notice.topic in (Topic.DECIDED, Topic.ENDED)]
    return payload(
        [_headed(say_opened(incident).sentence, cluster), *news[-3:]],
        [*owners(first), *links(first, places)],
        f"What happened: slurm-watchdog explain {incident.id}",
        (),
    )


def reply(story: Sequence[Notice], mentions: Mapping[str, str], *, first: bool) -> Payload:
    """What goes into the thread of an incident; `first`: the sentence of the first notice stands above it already."""
    said = [say(notice) for notice in story]
    evidence = [line for each in said for line in each.evidence]
    if first:
        sentences = [each.sentence for each in said[1:]] or ["Evidence"]
        return payload(sentences, evidence, said[-1].todo, ())
    return payload([each.sentence for each in said], evidence, said[-1].todo, wanted(story, mentions))


def has_more(story: Sequence[Notice]) -> bool:
    """Whether there is anything that a parent without evidence leaves out."""
    return any(say(notice).evidence for notice in story)


def closed(notice: Notice, cluster: str) -> Payload:
    """The parent of an incident that is over: who looks at the channel sees at once which are not."""
    incident = notice.incident
    sentence = f"over{lasted(incident)}: {about(incident, incident.summary)}"
    return payload(
        [_headed(sentence, cluster)],
        [incident.resolution, *owners(notice), *_cost(notice)],
        next_step(incident, "What happened: {}"),
        (),
    )


def _cost(notice: Notice) -> list[str]:
    """The GPU hours of its jobs while it lasted; nothing where their GPUs are not known."""
    incident = notice.incident
    lasted_s = max(0.0, (incident.resolved_at or incident.opened_at) - incident.opened_at)
    hours = sum(job.gpus for job in notice.jobs) * lasted_s / 3600.0
    return [f"Lost: about {hours:.2g} GPU hours"] if hours >= 0.01 else []


def owners(notice: Notice) -> list[str]:
    """Whose jobs they are, a line each."""
    return [
        f"Job {job.job_id}: {job.name or 'no name'}, {job.user}"
        + (f", {job.partition}" * bool(job.partition))
        + (f", {plural(job.gpus, 'GPU')}" * bool(job.gpus))
        for job in notice.jobs
        if job.user
    ]


def wanted(story: Sequence[Notice], mentions: Mapping[str, str]) -> tuple[str, ...]:
    """Ids of those whom the configuration wants mentioned, for what is critical or needs somebody; at most five."""
    if not mentions or not any(is_loud(notice) for notice in story):
        return ()
    keys = [f"{what}:{name}" for n in story for job in n.jobs for what, name in (("user", job.user), ("partition", job.partition))]  # fmt: skip
    found = [mentions[key] for key in keys if key in mentions] or [mentions.get("default", "")]
    return tuple(dict.fromkeys(each for each in found if each))[:5]


def is_loud(notice: Notice) -> bool:
    """Whether a person has to be woken by it: one is needed."""
    return notice.needs_person


def payload(
    sentences: Sequence[str], evidence: Sequence[str], todo: str, mention: Sequence[str] = ()
) -> Payload:
    """A message of three parts; every text is made harmless here."""
    head = [safe(sentence, SENTENCE_LIMIT) for sentence in sentences[:4]]
    blocks = [section("\n".join(head))]
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
    if mention:
        blocks.append(mention_block(mention))
    return message(" ".join(head), blocks)


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
    return {"type": "section", "text": {"type": "plain_text", "text": text or "-", "emoji": False}}


def mention_block(ids: Sequence[str]) -> Payload:
    """The block that calls people: ids of the configuration, which has checked them."""
    words = [
        f"<!{each}>"
        if each in ("here", "channel")
        else f"<!subteam^{each}>"
        if each.startswith("S")
        else f"<@{each}>"
        for each in ids
    ]
    return {"type": "section", "text": {"type": "mrkdwn", "text": " ".join(words), "verbatim": True}}


def _headed(sentence: str, cluster: str) -> str:
    return f"[{cluster}] {sentence}"


def plain(said: Said, cluster: str) -> Payload:
    """One message of its own."""
    return payload([_headed(said.sentence, cluster)], said.evidence, said.todo)
