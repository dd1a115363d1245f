"""Many notices in few messages: every incident is in it, by job or by what it is about, numbers folded into
ranges. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from slurm_watchdog.base.text import fold, plural, safe
from slurm_watchdog.model.actions import Action
from slurm_watchdog.model.incidents import Severity
from slurm_watchdog.notify.notification import Notice, Topic
from slurm_watchdog.notify.slack_messages import (
    BLOCK_LIMIT,
    LINE_LIMIT,
    SENTENCE_LIMIT,
    Payload,
    mention_block,
    message,
    section,
    wanted,
)
from slurm_watchdog.notify.wording import SEVERITY_WORDS, message_of

MAX_SENTENCES = 12
"""So few incidents are listed with their own sentences."""
MAX_URGENT = 10
MAX_MENTIONS = 5
BLOCKS_PER_MESSAGE = 3
"""In one message, beside its sentence."""
MAX_MESSAGES = 10
"""Messages of one digest: two minutes at five a minute. What is beyond is counted."""


class Digest:
    """Takes notices one by one, and keeps of each no more than its name."""

    def __init__(self, mentions: Mapping[str, str]) -> None:
        self._mentions = mentions
        self._called: dict[str, None] = {}
        self._opened: dict[tuple[str, Severity], list[str]] = defaultdict(list)
        self._sentences: list[str] = []
        self._urgent: list[str] = []
        self._decisions: Counter[str] = Counter()
        self._over: list[str] = []
        self._other: Counter[str] = Counter()
        self._incidents: set[str] = set()
        self._first_at = self._last_at = 0.0

    def add(self, notice: Notice) -> None:
        """One more. Call in the order in which they were put up."""
        incident = notice.incident
        self._first_at = self._first_at or notice.at
        self._last_at = notice.at
        self._incidents.add(incident.id)
        if len(self._called) < MAX_MENTIONS and notice.needs_person:
            self._called.update(dict.fromkeys(wanted((notice,), self._mentions)))
        if notice.topic is Topic.OPENED:
            self._opened[incident.kind, incident.severity].extend(_names(notice))
            if len(self._sentences) <= MAX_SENTENCES:
                self._sentences.append(message_of(notice).sentence)
        elif notice.topic is Topic.DECIDED and notice.decision is not None:
            decision = notice.decision
            what = "alert only" if decision.action is Action.NONE else f"{decision.action} {decision.verdict}"
            self._decisions[f"{what} ({decision.by})"] += 1
        elif notice.urgent:
            if len(self._urgent) < MAX_URGENT:
                self._urgent.append(message_of(notice).sentence)
            self._other["actions failed"] += 1
        elif notice.topic is Topic.ENDED:
            self._other["restarts done"] += 1
        elif notice.topic is Topic.RESOLVED:
            self._over.extend(_names(notice))
        else:
            self._other["silenced" if notice.topic is Topic.NOTED else "collections of evidence"] += 1

    def messages(self, cluster: str) -> list[Payload]:
        """The digest, in as few messages as it fits into; PARTS at most."""
        head = safe(f"[{cluster}] {self._sentence()}", SENTENCE_LIMIT)
        pages = list(_pages(_blocks(self._lines())))
        left_out = sum(len(block) for page in pages[MAX_MESSAGES:] for block in page)
        found = []
        for index, page in enumerate(pages[:MAX_MESSAGES] or [[]]):
            text = head if index == 0 else f"{head} (part {index + 1} of {min(len(pages), MAX_MESSAGES)})"
            blocks = [section(text), *(section("\n".join(block)) for block in page)]
            if index == min(len(pages), MAX_MESSAGES) - 1 or not pages:
                more = f"{plural(left_out, 'line')} left out. " if left_out else ""
                blocks.append(
                    section(f"{more}Each of them: slurm-watchdog incidents. Stop all actions: slurm-watchdog pause")
                )
            if index == 0 and self._called:
                blocks.append(mention_block(tuple(self._called)[:MAX_MENTIONS]))
            found.append(message(text, blocks))
        return found

    def _sentence(self) -> str:
        opened = Counter({kind: len(names) for (kind, _), names in self._opened.items()})
        over_s = self._last_at - self._first_at
        parts = []
        if opened:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in opened.most_common(4))
            more = f" and {len(opened) - 4} more kinds" if len(opened) > 4 else ""
            within = f" within {over_s:.0f} s" if over_s >= 2 else ""
            parts.append(f"{plural(opened.total(), 'incident')}{within}: {kinds}{more}")
        if self._urgent:
            parts.append(f"{plural(self._other['actions failed'], 'action')} FAILED")
        if self._over:
            parts.append(f"{plural(len(self._over), 'incident')} over")
        return "; ".join(parts) or f"news of {plural(len(self._incidents), 'incident')}"

    def _lines(self) -> Iterator[str]:
        yield from (f"NEEDS YOU: {line}" for line in self._urgent)
        if len(self._urgent) < self._other["actions failed"]:
            yield f"and {self._other['actions failed'] - len(self._urgent)} more actions failed"
        if len(self._sentences) <= MAX_SENTENCES:
            yield from self._sentences
        else:
            ranked = sorted(self._opened.items(), key=lambda each: (each[0][1] is not Severity.CRITICAL, -len(each[1])))
            for (kind, severity), names in ranked:
                yield from _listed(f"{SEVERITY_WORDS[severity]} {kind} × {len(names):,}", names)
        for what, number in self._decisions.most_common(20):
            yield f"{number:,} × {what}"
        for what in ("restarts done", "collections of evidence", "silenced"):
            if self._other[what]:
                yield f"{self._other[what]:,} {what}"
        if self._over:
            yield from _listed(f"over × {len(self._over):,}", self._over)


def _names(notice: Notice) -> list[str]:
    """What the incident is about: one name, so that the numbers add up."""
    incident = notice.incident
    return [",".join(incident.job_ids)] if 0 < len(incident.job_ids) <= 5 else [incident.subject]


def _listed(title: str, names: list[str]) -> Iterator[str]:
    """`title: names`, folded, over as many lines as it takes."""
    line = f"{title}: "
    pieces = [piece for name in fold(names) for piece in _split(name)]
    for index, piece in enumerate(pieces):
        added = piece + (", " if index < len(pieces) - 1 else "")
        if len(line) + len(added) > BLOCK_LIMIT // 2:
            yield line.rstrip()
            line = "… "
        line += added
    yield line.rstrip()


def _split(name: str) -> Iterator[str]:
    """A folded name that is very long, in pieces that each can stand alone: `n[1,3]` and `n[5,7]`."""
    prefix, bracket, inside = name.partition("[")
    if len(name) <= LINE_LIMIT or not bracket or not name.endswith("]"):
        yield name[:LINE_LIMIT]
        return
    ranges, kept = inside[:-1].split(","), ""
    for each in ranges:
        if len(prefix) + len(kept) + len(each) > LINE_LIMIT - 3:
            yield f"{prefix}[{kept}]"
            kept = ""
        kept += ("," if kept else "") + each
    yield f"{prefix}[{kept}]"


def _blocks(lines: Iterator[str]) -> Iterator[list[str]]:
    """Lines, made harmless, in blocks that Slack takes."""
    block: list[str] = []
    for line in lines:
        line = f"• {safe(line, BLOCK_LIMIT // 2 + 100)}"
        if sum(len(each) + 1 for each in block) + len(line) > BLOCK_LIMIT:
            yield block
            block = []
        block.append(line)
    if block:
        yield block


def _pages(blocks: Iterator[list[str]]) -> Iterator[list[list[str]]]:
    page: list[list[str]] = []
    for block in blocks:
        if len(page) == BLOCKS_PER_MESSAGE:
            yield page
            page = []
        page.append(block)
    if page:
        yield page
