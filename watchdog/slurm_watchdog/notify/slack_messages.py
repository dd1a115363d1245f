"""Slack messages as Block Kit documents. Pure. Names of jobs, paths and log lines come from users: they are escaped,
bounded, stripped of control characters and put into plain text, where nothing is a link or mentions a person. Blocks
that are no plain text hold ids and addresses of the configuration only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.text import fold, plural, safe
from slurm_watchdog.model.actions import Action
from slurm_watchdog.model.incidents import Severity
from slurm_watchdog.notify.notification import SEVERITY_WORDS, Notice, Site, Topic, message_of, messages_of, render

SENTENCE_LIMIT = 600
LINE_LIMIT = 300
BLOCK_LIMIT = 2900
"""Slack takes 3000 characters in one block of text; all blocks of a message together may have some 10,000,
which it documents nowhere (slackapi/bolt-js#2867): three of ours are below that."""
BLOCKS_PER_MESSAGE = 3  # of lines, beside the sentence
FACT_LIMIT = 12
HEADER_LIMIT = 150  # https://docs.slack.dev/reference/block-kit/blocks/header-block
FIELD_LIMIT = 300  # of 2,000 in each of ten: https://docs.slack.dev/reference/block-kit/blocks/section-block
MAX_MENTIONS = 5
MENTIONED = {"h": "!", "c": "!", "S": "!subteam^"}  # by the first letter: here, channel, a group; others are members
MARKS = {
    Severity.CRITICAL: "\N{LARGE RED CIRCLE}",
    Severity.WARNING: "\N{LARGE YELLOW CIRCLE}",
    Severity.INFO: "\N{LARGE BLUE CIRCLE}",
}
MARK_OVER = "\N{LARGE GREEN CIRCLE}"
FEW = 8  # so many alike in a digest keep their sentences
COUNTED = 4  # rank of decisions, which are about incidents that are listed
HEADED = 5  # titles in a digest's first sentence
LISTED_LIMIT = 1400  # characters of a line of a digest
TITLES = {Topic.DIAGNOSED: "collections of evidence", Topic.ENDED: "restarts done", Topic.RESOLVED: "over"}
FULL = 6000  # characters after which a digest takes no more notices: another page of them still fits

Payload = dict[str, Any]
MARKED: Payload = {"type": "mrkdwn", "verbatim": True}


def card(story: Sequence[Notice], site: Site) -> Payload:
    """The message in the channel about an incident: headline, fields, its sentences and evidence, what to do, links."""
    incident, is_over = story[-1].incident, any(each.topic is Topic.RESOLVED for each in story)
    fields = render(
        "card",
        first=story[0], incident=incident, site=site, is_over=is_over,
        lasted_s=max(0.0, (incident.resolved_at or story[-1].at) - incident.opened_at),
        since=datetime.fromtimestamp(incident.opened_at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        gpus=sum(job.gpus for job in story[0].jobs),
    )  # fmt: skip
    # Addresses of the configuration, which has checked them, with ids of ours in them; words of ours.
    links = [(site.page(incident), "Incident"), (site.runbook(incident), "Runbook")]
    words = " · ".join(f"<{address.replace('&', '&amp;')}|{name}>" for address, name in links if address)
    head = f"{MARK_OVER if is_over else MARKS[incident.severity]} {headline_of(story)}"
    shown = reply(story, site, [{"type": "context", "elements": [MARKED | {"text": words}]}] if words else [])
    before = [
        {"type": "header", "text": _plain(safe(head, HEADER_LIMIT))},
        {"type": "section", "fields": [_plain(safe(each, FIELD_LIMIT).replace(": ", "\n", 1)) for each in fields]},
    ]
    return shown | {"text": f"[{safe(site.cluster, LINE_LIMIT)}] {shown['text']}", "blocks": before + shown["blocks"]}


def updated(story: Sequence[Notice], site: Site) -> Payload:
    """The card after the news in `story`, which the thread has whole."""
    news = [each for each in story if each.topic in (Topic.DECIDED, Topic.ENDED)]
    return card([replace(story[0], topic=Topic.OPENED, decision=None, run=None), *news[-3:]], site)


def reply(story: Sequence[Notice], site: Site, after: Sequence[Payload] = ()) -> Payload:
    """News in the thread of an incident: sentences, evidence, what to do."""
    said = messages_of(story)
    evidence = [line for each in said for line in each.evidence if line.strip()]
    more = [f"and {len(evidence) - FACT_LIMIT} more"] if len(evidence) > FACT_LIMIT else []
    lines = _bulleted([*evidence[:FACT_LIMIT], *more], LINE_LIMIT)
    head = "\n".join(safe(each.sentence, SENTENCE_LIMIT) for each in said[:4])
    texts = [head, *lines, safe(said[-1].todo, SENTENCE_LIMIT)]
    return _payload(headline_of(story), texts, [*after, *_mention(wanted(story, site))])


def headline_of(story: Sequence[Notice]) -> str:
    """Of the newest notice, with what was decided or done last."""
    newest = [each for each in story if each.decision is not None or each.run is not None] or story
    return replace(newest[-1], incident=story[-1].incident).headline


def wanted(story: Iterable[Notice], site: Site) -> tuple[str, ...]:
    """Ids to mention by the configuration, if a person is needed."""
    if not any(notice.needs_person for notice in story):
        return ()
    jobs = ((job, notice.incident) for notice in story for job in notice.jobs or (None,))
    return tuple(dict.fromkeys(filter(None, (site.mention_for(*each) for each in jobs))))


def _mention(ids: Iterable[str]) -> list[Payload]:
    """The block that calls people: ids of the configuration, which has checked them."""
    words = " ".join([f"<{MENTIONED.get(each[0], '@')}{each}>" for each in ids][:MAX_MENTIONS])
    return [{"type": "section", "text": MARKED | {"text": words}}] if words else []


def _plain(text: str) -> Payload:
    return {"type": "plain_text", "text": text, "emoji": False}


def _payload(text: str, texts: Iterable[str], after: Sequence[Payload] = ()) -> Payload:
    """`text` is what a phone shows; `texts` are harmless already."""
    blocks = [{"type": "section", "text": _plain(each)} for each in texts if each]
    quiet = {"link_names": False, "unfurl_links": False, "unfurl_media": False}
    return {"text": safe(text, SENTENCE_LIMIT), "blocks": [*blocks, *after], **quiet}


# ------------------------------------------------------------------------------------------------- many in one


class Digest:
    """Many notices in one message: takes them one by one, in their order. Of what is alike the first few keep their
    sentences; if there are more, the jobs or places are listed instead, folded into ranges."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._called: dict[str, None] = {}
        self._incidents: set[str] = set()
        self._alike: dict[tuple[int, str], list[tuple[str, str]]] = defaultdict(list)
        """Rank and title -> what each is about, its sentence."""

    def add(self, notice: Notice) -> None:
        """One more."""
        incident = notice.incident
        self._incidents.add(incident.id)
        self._called.update(dict.fromkeys(wanted((notice,), self._site)))
        alike = self._alike[_rank(notice)]
        about = ",".join(incident.job_ids) if 0 < len(incident.job_ids) <= 5 else incident.subject
        sentence = f"{SEVERITY_WORDS[incident.severity]}: {notice.headline}"
        if notice.topic in (Topic.DECIDED, Topic.ENDED):
            sentence = message_of(notice).sentence
        alike.append((about, sentence if len(alike) < FEW else ""))

    def message(self, cluster: str) -> Payload:
        """The digest of all that was added."""
        ranked = sorted(self._alike.items(), key=lambda each: (each[0][0], -len(each[1])))
        head = ", ".join(f"{len(alike):,} {title}" for (_, title), alike in ranked[:HEADED])
        more = ", and more" if len(ranked) > HEADED else ""
        text = f"[{cluster}] {plural(len(self._incidents), 'incident')}: {head}{more}"
        end = "Each of them: slurm-watchdog incidents. Stop all actions: slurm-watchdog pause"
        return listing(text, self._lines(ranked), end, _mention(self._called))

    @property
    def is_full(self) -> bool:
        """Whether a message takes no more."""
        return sum(map(len, self._lines(self._alike.items()))) > FULL

    def _lines(self, groups: Iterable[tuple[tuple[int, str], list[tuple[str, str]]]]) -> Iterator[str]:
        for (rank, title), alike in groups:
            if len(alike) <= FEW:
                yield from (sentence for _, sentence in alike)
            elif rank == COUNTED:
                yield f"{title} × {len(alike):,}"
            else:
                names = sorted((about for about, _ in alike), key=lambda name: (len(name), name))
                yield from _listed(f"{title} × {len(alike):,}: ", names)


def _rank(notice: Notice) -> tuple[int, str]:
    """How far up in a digest, and the title of what is alike: failures, incidents by severity, decisions, the rest."""
    incident, decision = notice.incident, notice.decision
    if decision is not None:
        what = "alert only" if decision.action is Action.NONE else f"{decision.action} {decision.verdict}"
        return COUNTED, f"{what} ({decision.by})"
    if notice.topic is Topic.OPENED:
        return 1 + list(MARKS).index(incident.severity), f"{SEVERITY_WORDS[incident.severity]} {incident.kind}"
    return (0, "actions FAILED") if notice.failed else (COUNTED + 1, TITLES.get(notice.topic, "silenced"))


def _listed(title: str, names: Sequence[str]) -> list[str]:
    """`title`, then names, folded, over as many lines as it takes."""
    line, half = title + ", ".join(fold(names)), len(names) // 2
    if len(line) <= LISTED_LIMIT or not half:
        return [line]
    return [*_listed(title, names[:half]), *_listed("… ", names[half:])]


def listing(text: str, lines: Iterable[str], end: str, called: Sequence[Payload] = ()) -> Payload:
    """A sentence, and a line about each of many things, as far as one message takes them; `end`: where the rest is."""
    texts = _bulleted(lines, LISTED_LIMIT)
    left_out = sum(each.count("\n") + 1 for each in texts[BLOCKS_PER_MESSAGE:])
    more = f"{plural(left_out, 'line')} left out. " if left_out else ""
    return _payload(text, [safe(text, SENTENCE_LIMIT), *texts[:BLOCKS_PER_MESSAGE], more + end], called)


def _bulleted(lines: Iterable[str], limit: int) -> list[str]:
    """Lines, made harmless, in texts that a block takes."""
    texts: list[str] = []
    for each in lines:
        line = f"• {safe(each, limit)}"
        if texts and len(texts[-1]) + len(line) < BLOCK_LIMIT:
            texts[-1] += f"\n{line}"
        else:
            texts.append(line)
    return texts
