"""Slack messages as Block Kit documents. Pure.

Names of jobs, paths and log lines come from users: they are escaped, bounded, stripped of control characters
and put into plain text, where nothing is a link or mentions anybody. The blocks that are no plain text hold
ids and addresses of the configuration only.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.text import cut, duration, fold, plural, safe
from slurm_watchdog.model.actions import Action
from slurm_watchdog.model.incidents import Severity
from slurm_watchdog.notify.notification import Notice, Site, Topic
from slurm_watchdog.notify.wording import BY_HAND, SEVERITY_WORDS, message_of, messages_of, named, with_subject

SENTENCE_LIMIT = 600
LINE_LIMIT = 300
BLOCK_LIMIT = 2900
"""Slack takes 3000 characters in one block of text; all blocks of a message together may have some 10,000,
which it documents nowhere (slackapi/bolt-js#2867): three of ours are below that."""
BLOCKS_PER_MESSAGE = 3
"""Of lines, beside the sentence."""
FACT_LIMIT = 12
HEADER_LIMIT = 150
"""https://docs.slack.dev/reference/block-kit/blocks/header-block"""
FIELD_LIMIT = 300
"""Slack takes 2,000 in each of ten: https://docs.slack.dev/reference/block-kit/blocks/section-block"""
MENTIONED_GPU_HOURS = 0.01
MAX_MENTIONS = 5
MARKS = {
    Severity.CRITICAL: "\N{LARGE RED CIRCLE}",
    Severity.WARNING: "\N{LARGE YELLOW CIRCLE}",
    Severity.INFO: "\N{LARGE BLUE CIRCLE}",
}
MARK_OVER = "\N{LARGE GREEN CIRCLE}"
MAX_SENTENCES = 12
"""So few incidents of a digest are listed with their own sentences."""
MAX_FAILED = 10
LISTED_LIMIT = 1400
"""Characters of a line of a digest."""
COUNTED = {Topic.ENDED: "restarts done", Topic.DIAGNOSED: "collections of evidence", Topic.NOTED: "silenced"}
MAX_MESSAGES = 10
"""Messages of one digest: two minutes at five a minute. What is beyond is counted."""

Payload = dict[str, Any]


def card(story: Sequence[Notice], site: Site, mentions: Mapping[str, str], *, whole: bool = True) -> Payload:
    """The message in the channel about an incident: headline, fields, its sentence and the decisions so far, links.

    `whole`: with the evidence of everything in `story`; otherwise that follows in the thread. `mentions` is
    the configuration's.
    """
    said, incident = messages_of(story), story[-1].incident
    evidence = [line for each in said for line in each.evidence] if whole else []
    links = [(site.page(incident), "Incident"), (site.runbook(incident), "Runbook")]
    # Addresses of the configuration, which has checked them, with ids of ours in them; words of ours.
    words = " · ".join(f"<{address.replace('&', '&amp;')}|{name}>" for address, name in links if address)
    facts = _facts(story, site)
    before = [
        {"type": "header", "text": _plain(safe(_headline(story), HEADER_LIMIT))},
        {"type": "section", "fields": [_plain(f"{name}\n{safe(value, FIELD_LIMIT)}") for name, value in facts]},
    ]
    after = [{"type": "context", "elements": [_marked(words)]}] if words else []
    sentences = [each.sentence for each in said]
    shown = message(sentences, evidence, said[-1].todo, [*after, *mention_block(wanted(story, mentions))])
    return shown | {"text": f"[{safe(site.cluster, LINE_LIMIT)}] {shown['text']}", "blocks": before + shown["blocks"]}


def updated(story: Sequence[Notice], site: Site) -> Payload:
    """The card after the news in `story`, which the thread has whole."""
    news = [each for each in story if each.topic in (Topic.DECIDED, Topic.ENDED)]
    return card([replace(story[0], topic=Topic.OPENED), *news[-3:]], site, {}, whole=False)


def reply(story: Sequence[Notice], mentions: Mapping[str, str], *, first: bool) -> Payload:
    """A reply in the thread of an incident; `first`: the card already has the sentences and mentions."""
    said = messages_of(story)
    evidence = [line for each in said for line in each.evidence]
    sentences = [each.sentence for each in (said[1:] if first else said)] or ["Evidence"]
    return message(sentences, evidence, said[-1].todo, mention_block(() if first else wanted(story, mentions)))


def message(sentences: Sequence[str], evidence: Sequence[str], todo: str, after: Sequence[Payload] = ()) -> Payload:
    """Sentences, evidence, what to do. Every text is made harmless here."""
    head = [safe(sentence, SENTENCE_LIMIT) for sentence in sentences[:4]]
    lines = [f"• {safe(line, LINE_LIMIT)}" for line in evidence[:FACT_LIMIT] if line.strip()]
    left_out = max(0, len(evidence) - FACT_LIMIT)
    while sum(len(line) + 1 for line in lines) > BLOCK_LIMIT - 40:
        lines.pop()
        left_out += 1
    if left_out:
        lines.append(f"• and {left_out} more")
    blocks = [*([section("\n".join(lines))] if lines else []), *([section(safe(todo, SENTENCE_LIMIT))] if todo else [])]
    return _payload(_running(head), [section("\n".join(head)), *blocks, *after])


def wanted(story: Iterable[Notice], mentions: Mapping[str, str]) -> tuple[str, ...]:
    """Ids to mention by the configuration, if a person is needed."""
    if not mentions or not any(notice.needs_person for notice in story):
        return ()
    jobs = [job for notice in story for job in notice.jobs]
    keys = [key for job in jobs for key in (f"user:{job.user}", f"partition:{job.partition}")]
    found = [mentions[key] for key in keys if key in mentions] or [mentions.get("default", "")]
    return tuple(dict.fromkeys(filter(None, found)))[:MAX_MENTIONS]


def mention_block(ids: Iterable[str]) -> list[Payload]:
    """The block that calls people: ids of the configuration, which has checked them."""
    words = [
        f"<!{each}>" if each in ("here", "channel") else f"<!subteam^{each}>" if each.startswith("S") else f"<@{each}>"
        for each in ids
    ]
    return [{"type": "section", "text": _marked(" ".join(words))}] if words else []


def section(text: str) -> Payload:
    """A block of plain text."""
    return {"type": "section", "text": _plain(text or "-")}


def _plain(text: str) -> Payload:
    return {"type": "plain_text", "text": text, "emoji": False}


def _marked(text: str) -> Payload:
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _payload(text: str, blocks: list[Payload]) -> Payload:
    """`text` is what a phone shows; it is harmless already, and so are the blocks."""
    quiet = {"link_names": False, "unfurl_links": False, "unfurl_media": False}
    return {"text": cut(text, 2 * SENTENCE_LIMIT), "blocks": blocks, **quiet}


def _running(sentences: Sequence[str]) -> str:
    """Sentences one behind the other, each but the last with its stop, each but the first with a capital."""
    stopped = [each if each.endswith((".", "!", "?", "…", ":")) else f"{each}." for each in sentences[:-1]]
    first, *others = [*stopped, *sentences[-1:]]
    return " ".join([first, *(each[:1].upper() + each[1:] for each in others)])


def _headline(story: Sequence[Notice]) -> str:
    """The first clause of what is wrong, without its brackets, and the state of the response:
    `Rank 2 on n3 of job 4711 is stopped (needs a person)`."""
    incident = story[-1].incident
    text = re.sub(r"\(pid \d+ on (\S+?)\)", r"on \1", incident.summary)
    while (shorter := re.sub(r"\s*\([^()]*\)", "", text)) != text:
        text = shorter
    clause = with_subject(incident, re.split(r"[:;]\s|\.(?:\s|$)", text, maxsplit=1)[0])
    newest = next((each for each in reversed(story) if each.topic in (Topic.DECIDED, Topic.ENDED)), None)
    if _is_over(story):
        return f"{MARK_OVER} {clause} (over)"
    state = ""
    if story[-1].needs_person:
        state = " (needs a person)"
    elif newest is not None and newest.decision is not None and newest.decision.acts:
        state = f" ({BY_HAND[newest.decision.action][0]}: under way)"
    return f"{MARKS[incident.severity]} {clause}{state}"


def _is_over(story: Sequence[Notice]) -> bool:
    return any(each.topic is Topic.RESOLVED for each in story)


def _facts(story: Sequence[Notice], site: Site) -> list[tuple[str, str]]:
    """(name, value) of the fields; names are ours."""
    first, incident, over = story[0], story[-1].incident, _is_over(story)
    lasted_s = max(0.0, (incident.resolved_at or story[-1].at) - incident.opened_at)
    jobs = [f"{job.job_id} {job.name}".strip() for job in first.jobs] or list(incident.job_ids[:5])
    owners = [f"{job.user}{f', partition {job.partition}' if job.partition else ''}" for job in first.jobs if job.user]
    gpus = sum(job.gpus for job in first.jobs)
    hours = gpus * lasted_s / 3600.0
    lost = f"about {hours:{',.0f' if hours >= 10 else '.2g'}} GPU hours ({plural(gpus, 'GPU')})"
    more = f" and {len(incident.culprits) - 1} more" if len(incident.culprits) > 1 else ""
    since = datetime.fromtimestamp(incident.opened_at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    noticed = f", noticed after {duration(incident.detected_after_s)}" if incident.detected_after_s else ""
    facts = [
        ("Cluster", site.cluster),
        ("Job" if len(jobs) == 1 else "Jobs", ", ".join(jobs)),
        ("Owner", "; ".join(dict.fromkeys(owners))),
        ("Where", f"{named(incident.culprits[0])}{more}" if incident.culprits else ""),
        ("Lasted", duration(lasted_s)) if over else ("Since", since + noticed),
        ("Lost" if over else "Lost so far", lost if hours >= MENTIONED_GPU_HOURS else ""),
    ]
    return [(name, value) for name, value in facts if value]


# ------------------------------------------------------------------------------------------------- many in one


class Digest:
    """Many notices in few messages: takes them one by one, in their order, and keeps of each no more than its name."""

    def __init__(self, mentions: Mapping[str, str]) -> None:
        self._mentions = mentions
        self._called: dict[str, None] = {}
        self._first_at = self._last_at = 0.0
        self._opened: dict[tuple[Severity, str], list[str]] = defaultdict(list)
        """Severity and kind -> what each of them is about."""
        self._sentences: list[str] = []
        self._failed: list[str] = []
        self._over: list[str] = []
        self._counted: Counter[str] = Counter()
        self._incidents: set[str] = set()

    def add(self, notice: Notice) -> None:
        """One more."""
        incident, decision = notice.incident, notice.decision
        self._first_at, self._last_at = self._first_at or notice.at, notice.at
        self._incidents.add(incident.id)
        self._called.update(dict.fromkeys(wanted((notice,), self._mentions)))
        about = ",".join(incident.job_ids) if 0 < len(incident.job_ids) <= 5 else incident.subject
        if notice.topic is Topic.OPENED:
            self._opened[incident.severity, incident.kind].append(about)
            if len(self._sentences) <= MAX_SENTENCES:
                self._sentences.append(message_of(notice).sentence)
        elif decision is not None:
            what = "alert only" if decision.action is Action.NONE else f"{decision.action} {decision.verdict}"
            self._counted[f"{what} ({decision.by})"] += 1
        elif notice.urgent:
            self._failed.append(message_of(notice).sentence)
        elif notice.topic is Topic.RESOLVED:
            self._over.append(about)
        else:
            self._counted[COUNTED[notice.topic]] += 1

    def messages(self, cluster: str) -> list[Payload]:
        """The digest, in as few messages as it fits into."""
        opened = Counter({kind: len(about) for (_, kind), about in self._opened.items()})
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in opened.most_common(4))
        more = f" and {len(opened) - 4} more kinds" if len(opened) > 4 else ""
        within_s = self._last_at - self._first_at
        within = f" within {within_s:.0f} s" if within_s >= 2 else ""
        parts = (
            f"{plural(opened.total(), 'incident')}{within}: {kinds}{more}" if opened else "",
            f"{plural(len(self._failed), 'action')} FAILED" if self._failed else "",
            f"{plural(len(self._over), 'incident')} over" if self._over else "",
        )
        sentence = "; ".join(filter(None, parts)) or f"news of {plural(len(self._incidents), 'incident')}"
        end = "Each of them: slurm-watchdog incidents. Stop all actions: slurm-watchdog pause"
        called = mention_block(tuple(self._called)[:MAX_MENTIONS])
        return pages(f"[{cluster}] {sentence}", self._lines(), end, MAX_MESSAGES, called)

    def _lines(self) -> Iterator[str]:
        yield from (f"NEEDS YOU: {line}" for line in self._failed[:MAX_FAILED])
        if (more := len(self._failed) - MAX_FAILED) > 0:
            yield f"and {more:,} more actions failed"
        if len(self._sentences) <= MAX_SENTENCES:
            yield from self._sentences
        else:
            worst_first = sorted(self._opened.items(), key=lambda each: (list(MARKS).index(each[0][0]), -len(each[1])))
            for (severity, kind), about in worst_first:
                yield from _listed(f"{SEVERITY_WORDS[severity]} {kind} × {len(about):,}: ", about)
        yield from (f"{number:,} × {what}" for what, number in self._counted.most_common(20))
        if self._over:
            yield from _listed(f"over × {len(self._over):,}: ", self._over)


def _listed(title: str, names: Sequence[str]) -> Iterator[str]:
    """`title`, then names, folded, over as many lines as it takes."""
    line = title + ", ".join(fold(names))
    if len(line) <= LISTED_LIMIT or len(names) == 1:
        yield line
        return
    names = sorted(names, key=lambda name: (len(name), name))
    yield from _listed(title, names[: len(names) // 2])
    yield from _listed("… ", names[len(names) // 2 :])


def pages(text: str, lines: Iterable[str], end: str, most: int, called: Sequence[Payload] = ()) -> list[Payload]:
    """A sentence and a line about each of many things, in as few messages as they fit into and no more than `most`;
    `end` says where the rest is."""
    blocks: list[list[str]] = [[]]
    for line in (f"• {safe(each, LISTED_LIMIT)}" for each in lines):
        if sum(len(each) + 1 for each in blocks[-1]) + len(line) > BLOCK_LIMIT:
            blocks.append([])
        blocks[-1].append(line)
    parts = [blocks[start : start + BLOCKS_PER_MESSAGE] for start in range(0, len(blocks), BLOCKS_PER_MESSAGE)]
    left_out = sum(len(block) for part in parts[most:] for block in part)
    last = min(len(parts), most)
    found = []
    for number, part in enumerate(parts[:most], 1):
        head = safe(text + (f" (part {number} of {last})" if number > 1 else ""), SENTENCE_LIMIT)
        shown = [section(head), *(section("\n".join(block)) for block in part if block)]
        if number == last:
            shown.append(section((f"{plural(left_out, 'line')} left out. " if left_out else "") + end))
        found.append(_payload(head, [*shown, *(called if number == 1 else ())]))
    return found
