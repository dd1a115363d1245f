"""Every message of a bad day, in the order in which people got it, and what no such sequence may say.

The days are those of the simulation: the real controller, its journal and its notifier, over a scripted cluster. Each
rule is one function from a sequence to sentences; no sentence, no contradiction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slurm_watchdog.model.incidents import Severity
from slurm_watchdog.notify.notification import Message, Notice, Topic, message_of
from tests.simulation.cluster import EPOCH
from tests.simulation.recipe import Recipe
from tests.simulation.sim import Simulation, simulation


@dataclass(frozen=True)
class Said:
    """One message."""

    at: float
    """Seconds of the day."""
    notice: Notice
    message: Message

    @property
    def topic(self) -> Topic:
        return self.notice.topic

    @property
    def incident_id(self) -> str:
        return self.notice.incident.id

    @property
    def line(self) -> str:
        return f"{self.at:.0f} s, {self.notice.incident.kind} {self.topic}: {self.message.sentence}"


@dataclass
class Listener:
    """A channel that keeps what it gets."""

    name: str = "listener"
    topics: frozenset[Topic] = frozenset(Topic)
    said: list[Said] = field(default_factory=list)

    async def send_due(self, outbox: Any, now: float) -> float | None:
        items = outbox.pending(100, self.name)
        for item in items:
            notice = msgspec.convert(item.payload, Notice)
            self.said.append(Said(notice.at - EPOCH, notice, message_of(notice)))
        outbox.done_all(self.name, [item.id for item in items])
        return None


def listen(recipe: Recipe, script: Callable[[Simulation], None]) -> list[Said]:
    """All messages of a day."""
    with simulation(recipe, script) as sim:
        listener = Listener()
        sim.listeners.append(listener)
        sim.run()
        assert not sim.complaints, sim.complaints
        return listener.said


# ---------------------------------------------------------------------------------------- the rules

Story = Sequence[Said]
Rule = Callable[[Story], Iterator[str]]

OVERLAP_S = 120.0
"""Two critical incidents of one job that begin within this time have one cause."""
CLOCK_S = 8.0
"""Two sentences may date the same moment so differently: an interval of reports, and rounding."""
THEN = (
    (r"was not (\w+)(?! yet)\b", r"is being {}\b", "what was refused is done"),
    (r"is being (\w+)", r"was not {} ", "what was begun is refused"),
    (r"a restart (?:often|does not|would)|another restart would", r"is being re|would have been re", "advised against"),
    (r"was killed by the kernel", r"killed no process", "the kernel's kill is denied"),
)
"""(what was said of a job, what may not be said of it within OVERLAP_S after that, why)."""
NAMES_NOBODY = re.compile(r"no rank is identified|nothing can be said|not (?:known|identified) who")
NOT_A_SENTENCE = re.compile(r"\bNone\b|\bnan\b|\b-\d+ s\b|\(\)|\{|\}|\b0 of 0\b|,\s*[,.]|;\s*[;.]|\b(\w+) \1\b")
AGES = (
    ("the last step", re.compile(r"no step for (\d+) s")),
    ("the last step", re.compile(r"after step \d+, (\d+) s ago")),
    (
        "the end of the rank",
        re.compile(r"\((?:pid \d+ on [\w-]+|on [\w-]+)\) (?:ended|was killed [^,.;]*?),? (\d+) s ago"),
    ),
)
"""(of what, the age in a sentence)."""


def begins_with_its_verdict(story: Story) -> Iterator[str]:
    """An incident is opened once before anything else is said of it, ends once, and then nothing is said of it."""
    is_open: dict[str, bool] = {}
    for each in story:
        known = is_open.get(each.incident_id)
        if each.topic is Topic.OPENED and known:
            yield f"opened twice: {each.line}"
        if each.topic is not Topic.OPENED and known is None:
            yield f"before its incident was reported: {each.line}"
        if each.topic not in (Topic.OPENED, Topic.ENDED) and known is False:
            yield f"after its incident was over: {each.line}"
        is_open[each.incident_id] = each.topic is not Topic.RESOLVED if known is not None else True


def contradicts_itself(story: Story) -> Iterator[str]:
    """What was said of a job is not the opposite of what was said of it before."""
    for number, first in enumerate(story):
        for later in story[number + 1 :]:
            same_job = set(first.notice.incident.job_ids) & set(later.notice.incident.job_ids)
            if not same_job or later.at - first.at > OVERLAP_S:
                continue
            for said, then, why in THEN:
                found = re.search(said, first.message.sentence)
                if found and re.search(then.format(*found.groups()), later.message.sentence):
                    yield f"{why}: {first.line}\n  then: {later.line}"


def keeps_who_was_named(story: Story) -> Iterator[str]:
    """Evidence names who the verdict named, or says that it does not."""
    for each in story:
        named = {c.rank for c in each.notice.incident.culprits if c.rank is not None}
        if each.topic is Topic.DIAGNOSED and named and NAMES_NOBODY.search(each.message.sentence):
            yield f"the verdict named rank {sorted(named)}: {each.line}"


def one_cause_is_one_critical(story: Story) -> Iterator[str]:
    """No two critical incidents of one job are open that began within OVERLAP_S, and none follows one that an action
    has just ended."""
    open_ones: dict[str, Said] = {}
    acted: list[Said] = []
    for each in story:
        incident = each.notice.incident
        if each.topic is Topic.ENDED:
            acted.append(each)
        if each.topic is Topic.RESOLVED:
            open_ones.pop(incident.id, None)
        if each.topic is not Topic.OPENED or incident.severity is not Severity.CRITICAL or not incident.job_ids:
            continue
        near = [*open_ones.values(), *(other for other in acted if other.notice.incident.kind == incident.kind)]
        for other in near:
            same_job = set(incident.job_ids) & set(other.notice.incident.job_ids)
            if same_job and each.at - other.at <= OVERLAP_S and other.incident_id != incident.id:
                yield f"two critical incidents of one cause: {other.line}\n  and: {each.line}"
        open_ones[incident.id] = each


def ages_fit_the_clock(story: Story) -> Iterator[str]:
    """Two sentences of one incident date the same moment alike."""
    known: dict[tuple[str, str], tuple[float, Said]] = {}
    for each in story:
        for of_what, pattern in AGES:
            found = None if each.topic is Topic.RESOLVED else pattern.search(each.message.sentence)
            if found is None:
                continue
            at = each.at - float(found[1])
            before = known.setdefault((each.incident_id, of_what), (at, each))
            if abs(before[0] - at) > CLOCK_S:
                yield f"{of_what} was {abs(before[0] - at):.0f} s apart: {before[1].line}\n  and: {each.line}"


def reads_well(story: Story) -> Iterator[str]:
    """No value stands where a word is missing."""
    for each in story:
        for text in (each.message.sentence, each.message.todo):
            if found := NOT_A_SENTENCE.search(text):
                yield f"{found[0]!r}: {each.line}"


RULES: tuple[Rule, ...] = (
    begins_with_its_verdict,
    contradicts_itself,
    keeps_who_was_named,
    one_cause_is_one_critical,
    ages_fit_the_clock,
    reads_well,
)


def contradictions(story: Story) -> list[str]:
    """Every violation, as `rule: what`."""
    return [f"{rule.__name__}: {found}" for rule in RULES for found in rule(story)]
