"""A headline names rank, node, what is wrong and what is done about it, in 120 characters, for every kind."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.model.actions import ActionEnd
from slurm_watchdog.model.headline import HEADLINE_LIMIT, headline, needs_person, place, response
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState
from slurm_watchdog.notify.notification import Site, Topic
from slurm_watchdog.notify.programs import event_json
from slurm_watchdog.notify.slack_messages import card
from tests.builders.notices import DECISION, INCIDENT, notice, replace

FOUND = Path(__file__).parents[2] / "captures/findings.jsonl"
"""What the detectors found in their own tests: a line each, of every kind and sentence some."""
RESPONSES = ("", "over", "restarting", "needs a person", "ending it for the next of its chain")
AVOIDED = Path(__file__).parents[2] / "architecture/words_to_avoid.txt"
ROWS = [line.rsplit(" | ", 1)[0] for line in AVOIDED.read_text().splitlines() if not line.startswith("#")]
NOT_PLAIN = re.compile("|".join(rf"\b(?:{row})(?!\w)" for row in ROWS), re.IGNORECASE)
LONG = "gpu-node-with-a-long-name-0001.rack12.hall3.example.org"


def incidents() -> list[Incident]:
    found = [msgspec.json.decode(line) for line in FOUND.read_text().splitlines()]
    asked = {"kind": IncidentKind.OPERATOR_RESTART, "summary": "ann asked for a restart of job 7", "job_ids": ["7"]}
    about = {"id": "i1", "subject": "", "state": "firing", "opened_at": 0.0, "pending_mono": 0.0}
    return [msgspec.convert({"severity": "critical"} | each | about, Incident) for each in (*found, asked)]


def names(text: str, who: Culprit) -> bool:
    known = [rf"\branks? (?:[\d, -]+ (?:and )?)?{who.rank}\b"] if who.rank is not None else []
    known += [re.escape(who.node)] if who.node else []
    return all(re.search(each, text, re.IGNORECASE) for each in known)


def test_every_kind_has_a_headline_that_names_who_and_is_short() -> None:
    found = incidents()
    assert {each.kind for each in found} == set(map(str, KINDS))
    for incident in found:
        for words in RESPONSES:
            text = headline(incident, words)
            assert len(text) <= HEADLINE_LIMIT, text
            assert text.endswith(f" ({words})" if words else ""), text
            assert not NOT_PLAIN.search(text), text
            assert not incident.culprits or names(text, incident.culprits[0]) or len(incident.culprits) > 1, text
            assert not re.search(r"\(pid|\(\)|[,:;.] ?(?:\(|$)|  ", text), text


@pytest.mark.parametrize("incident", [each for each in incidents() if each.culprits], ids=lambda each: each.kind)
def test_a_long_name_of_a_node_and_sixteen_of_them_leave_room_for_what_is_wrong(incident: Incident) -> None:
    (first, *_), summary = incident.culprits, incident.summary
    if first.node:
        text = re.sub(rf"(?<![\w-]){re.escape(first.node)}(?![\w-])", LONG, summary)
        renamed = replace(incident, summary=text, culprits=(replace(first, node=LONG),))
        shown = headline(renamed, "needs a person")
        assert len(shown) <= HEADLINE_LIMIT
        assert names(shown, renamed.culprits[0]), shown
    many = tuple(Culprit(node=f"n{number}", rank=8 * number + number % 3) for number in range(1, 17))
    shown = headline(replace(incident, culprits=many), "needs a person")
    assert len(shown) <= HEADLINE_LIMIT
    assert names(shown, many[0]), shown


@pytest.mark.parametrize(
    "name", ["x" * 5000, "(" * 3000, "a: b; c. d", "<!channel> \x1b[31m\u202e", "rank 3 on n1: fine", "", "job 7"]
)
def test_a_hostile_name_of_a_job_neither_breaks_the_headline_nor_hides_who(name: str) -> None:
    for incident in incidents():
        shown = headline(replace(incident, summary=f"{name} ({name}) {incident.summary}"), "needs a person")
        assert 0 < len(shown) <= HEADLINE_LIMIT
        assert shown.isprintable()
        assert shown.endswith(" (needs a person)")
        assert not incident.culprits or names(shown, incident.culprits[0]) or len(incident.culprits) > 1


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        ("Rank 3 (pid 9 on n1) of job 7 is stopped: 3 ranks wait.", "Rank 3 on n1 of job 7 is stopped: 3 ranks wait"),
        (
            "Job 7 hangs after step 5: no step for 70 s (limit 60 s); rank 3 (pid 9 on n1) waits for its data loader, in "
            "next (a.py:1), 3 ranks wait for it.",
            "Rank 3 on n1 waits for its data loader: job 7 hangs after step 5",
        ),
        ("Job 7 ended; rank 3 on n1 failed first: a KeyError", "Rank 3 on n1 failed first: a KeyError, job 7"),
        ("rank 3 waits alone.", "Rank 3 on n1 waits alone, job 7"),
        ("Job 7 is slower.", "Rank 3 on n1: job 7 is slower"),
        ("", "Rank 3 on n1: Collective hang, job 7"),
    ],
)
def test_what_is_wrong_follows_who(summary: str, shown: str) -> None:
    assert headline(replace(INCIDENT, summary=summary)) == shown


def test_places_are_folded_and_long_lists_name_the_first() -> None:
    some = [Culprit(node=f"n{number // 4}", rank=number) for number in range(16)]
    assert place(some) == "ranks 0-15 on n[0-3]"
    assert place([Culprit(node=f"{number}.{LONG}", rank=number) for number in range(16)]) == (
        f"rank 0 on 0.{LONG} and 15 more"
    )
    assert place([]) == ""


def test_what_is_done_is_the_same_everywhere() -> None:
    failed, ok = (ActionEnd(ok=ok, ended_at=1.0, detail="") for ok in (False, True))
    over = replace(INCIDENT, state=IncidentState.RESOLVED)
    assert [
        response(INCIDENT), response(INCIDENT, DECISION), response(INCIDENT, DECISION, ok), response(over, DECISION, failed),
        response(INCIDENT, replace(DECISION, verdict="observed")), response(INCIDENT, DECISION, failed),
    ] == ["", "restarting", "restarted", "over", "needs a person", "needs a person"]  # fmt: skip
    assert needs_person(replace(INCIDENT, job_ids=()))
    assert not needs_person(replace(INCIDENT, job_ids=(), severity="warning"))
    each = notice(Topic.DECIDED, decision=DECISION)
    assert event_json(each, Site(cluster="a"))["headline"] in card([each], Site(cluster="a"))["text"]
