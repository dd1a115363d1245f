"""Names of jobs, users and partitions, log lines and paths are written by users. Whatever they hold: nobody is mentioned, nothing is a
link, nothing is markup, no cursor moves, and there is no series more.

A bounded share of the strings runs here; all of them with HOSTILE_STRINGS=100000 (some minutes).
"""

from __future__ import annotations

import json
import os
import random
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.unit import builders
from tests.unit.notices import DECISION, FAILED, INCIDENT, replace
from tests.unit.slack_server import too_long
from watchdog.agent.metrics import JOB_ID, AgentMetrics
from watchdog.cli import live
from watchdog.cli.answers import Status
from watchdog.cli.status import _row
from watchdog.cli.text import clean
from watchdog.controller.metrics import ControllerMetrics
from watchdog.model import Blocked, Culprit, Report
from watchdog.notify.alertmanager import alert_json
from watchdog.notify.digest import Digest
from watchdog.notify.harmless import fold
from watchdog.notify.notice import JobNote, Notice, Topic
from watchdog.notify.pulse import JobPulse, pulse_message
from watchdog.notify.slack_messages import Payload, closed, parent, reply
from watchdog.notify.webhook import event_json
from watchdog.runner import Isolated

NUMBER = int(os.environ.get("HOSTILE_STRINGS", "1000"))
BATCH = 50

PIECES = (
    "<!channel>", "<!here>", "<!everyone>", "<@U024BE7LH>", "<#C024BE91L>", "<!subteam^S0604QSJC>", "@channel", "@here", "@everyone",
    "<https://evil.example|your bank>", "<mailto:x@evil.example>", "https://evil.example", "[link](https://evil.example)",
    "&lt;!channel&gt;", "&amp;", "&", "<", ">", "<!date^0^{date}^https://evil.example|x>", "*bold*", "_it_", "~no~", "`code`", "```", ":skull:",
    "\x1b[31m", "\x1b[2J", "\x1b[H", "\x1b]0;title\x07", "\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\", "\x1bP$q\x1b\\", "\x1b(0",
    "\x9b31m", "\x9d0;t\x9c", "\x90", "\x85", "\x07", "\x08\x08\x08", "\x00", "\x7f", "\r", "\n", "\r\n", "\v", "\f", "\t", "\u2028", "\u2029",
    "\u202e", "\u202a", "\u2066", "\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\ue000", "\U000e0001", "\ud7ff", "\ufffe", "\u0300" * 30,
    "[red]", "[/]", "[bold red on white]x[/]", "[link=https://evil.example]y[/link]", "\\[", "{job_id}", "%n%s", "${IFS}", "$(id)", "'; --",
    '"', "'", "\\", "\\n", '",evil="1', '"} 1\nevil_total{a="b', "# HELP evil x", "\n# TYPE evil counter\nevil 1\n", "{{ .Labels }}", "{{range}}",
    "</text>", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "javascript:alert(1)", "名前", "naïve", "🦥", "İ", "ß", "x" * 4000, "",
)  # fmt: skip


def strings(number: int) -> Iterator[str]:
    """The same each time: pieces alone, then put together, then any characters."""
    yield from PIECES
    chance = random.Random("hostile")
    for _ in range(number - len(PIECES)):
        if chance.random() < 0.7:
            yield "".join(chance.choices(PIECES, k=chance.randint(2, 6)))
        else:
            yield "".join(chr(_any(chance)) for _ in range(chance.randint(1, 60)))


def _any(chance: random.Random) -> int:
    top = chance.choice((0x80, 0x100, 0x3000, 0x10FFFF))
    number = chance.randrange(top)
    return number if not 0xD800 <= number < 0xE000 else 0xFFFD


def batches() -> list[list[str]]:
    found = list(strings(max(NUMBER, len(PIECES))))
    return [found[start : start + BATCH] for start in range(0, len(found), BATCH)]


def is_quiet(text: str, lines: bool = False) -> bool:
    """No control, format, private or unassigned character, and no line or paragraph separator."""
    return all(
        (char not in "\u2028\u2029" and unicodedata.category(char)[0] != "C") or (lines and char == "\n")
        for char in text
    )


def check_slack(message: Payload) -> None:
    for block in message["blocks"]:
        assert block["type"] == "section"
        assert block["text"]["type"] == "plain_text"
        assert block["text"]["emoji"] is False
        check_escaped(block["text"]["text"])
    check_escaped(message["text"])
    assert (message["link_names"], message["unfurl_links"], message["unfurl_media"]) == (False, False, False)
    assert not too_long(message)


def check_escaped(text: str) -> None:
    assert is_quiet(text.replace("\N{REPLACEMENT CHARACTER}", ""), lines=True)
    assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", text)


def story(text: str) -> list[Notice]:
    incident = replace(
        INCIDENT, summary=text, facts=(text,) * 3, subject=text, resolution=text, resolved_at=200.0,
        culprits=(Culprit(path=text, reason=text, node=text),), job_ids=(),
    )  # fmt: skip
    failed = replace(FAILED, end=replace(FAILED.end, detail=text))
    common: dict[str, Any] = {
        "at": 1.0,
        "incident": incident,
        "jobs": (JobNote(job_id=text, user=text, partition=text, name=text),),
    }
    return [
        Notice(topic=Topic.OPENED, **common),
        Notice(topic=Topic.DIAGNOSED, said=(text, text), **common),
        Notice(topic=Topic.DECIDED, decision=replace(DECISION, reason=text, by=text, exclude=(text,), asked_by=text), **common),
        Notice(topic=Topic.ENDED, run=failed, **common),
        Notice(topic=Topic.RESOLVED, **common),
    ]  # fmt: skip


def test_in_slack_it_is_text_and_nothing_else() -> None:
    mentions = {"default": ""}
    for batch in batches():
        digest = Digest(mentions)
        for text in batch:
            told = story(text)
            check_slack(parent(told, text, mentions, whole=True))
            check_slack(reply(told, mentions, first=False))
            check_slack(closed(told[-1], text))
            for notice in told:
                digest.add(notice)
        for message in digest.messages("c"):
            check_slack(message)
        pulses = [
            JobPulse(job_id=t, user=t, name=t, nodes=(t,), running_s=5.0, phase=t, waits_for=t, step=5)
            for t in batch
        ]
        check_slack(pulse_message([*pulses, *(replace(each, running_s=None) for each in pulses)], "c"))


def test_in_a_mention_stand_ids_of_the_configuration_only() -> None:
    for text in strings(len(PIECES)):
        message = parent(story(text), "c", {f"user:{text}": "U024BE7LH", "default": "here"}, whole=True)
        marked = [block["text"]["text"] for block in message["blocks"] if block["text"]["type"] == "mrkdwn"]
        assert marked in (["<@U024BE7LH>"], ["<!here>"])


def test_for_programs_it_is_a_json_string() -> None:
    for batch in batches():
        for text in batch:
            for notice in story(text):
                sent = json.dumps(event_json(notice))
                assert sent.isascii()
                assert json.loads(sent)["incident"]["subject"] == text
            alert = alert_json(story(text)[0], text)
            assert all(
                is_quiet(value.replace("\N{REPLACEMENT CHARACTER}", "")) for value in alert["labels"].values()
            )
            assert all(
                is_quiet(value.replace("\N{REPLACEMENT CHARACTER}", ""), lines=True)
                for value in alert["annotations"].values()
            )
            assert set(alert["labels"]) <= {"alertname", "cluster", "kind", "severity", "incident", "job_id"}


def test_on_a_terminal_it_moves_no_cursor_and_begins_no_line() -> None:
    for batch in batches():
        for text in batch:
            assert is_quiet(clean(text))
        document = {
            "mode": "observe", "controller": {}, "slurm": {}, "nodes": {"reporting": batch, "silent": batch},
            "incidents": {"firing": 1}, "open": [{"id": t, "kind": t, "state": "firing", "summary": t} for t in batch],
            "jobs": [{"job_id": t, "name": t, "user": t, "phase": t, "nodes": [t]} for t in batch],
        }  # fmt: skip
        status = msgspec.convert(document, Status)
        console = Console(width=200, height=60, color_system=None)
        with console.capture() as capture:
            console.print(live.frame(status, "".join(batch), "", live.History(), 0.0, 60))
        drawn = capture.get()
        assert is_quiet(drawn, lines=True)
        assert len(drawn.splitlines()) <= 60
        for job in status.jobs:
            assert is_quiet("".join(map(clean, _row(job))))


def series(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """(name, labels) of what Prometheus would store; its own parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def agent_text(batch: list[str]) -> str:
    metrics = AgentMetrics()
    blocked = Blocked(thread_id=1, seconds=5.0, state="D", syscall="write", path="/x", mount="/x")
    report = Report(
        node="n1", boot_id="b", agent_id="a", sequence=1,
        processes=tuple(
            builders.process(0, job_id=text, comm=text, pid=number + 1, blocked=replace(blocked, path=text, mount=text))
            for number, text in enumerate(batch)
        ),
    )  # fmt: skip
    metrics.update(report, Isolated(), 0)
    return metrics.render().decode()


def controller_text(batch: list[str]) -> str:
    metrics = ControllerMetrics()
    jobs = [
        builders.job(job=builders.slurm_job(job_id=str(n), name=t, user=t, partition=t, account=t, comment=t, workdir=t, stdout=t))
        for n, t in enumerate(batch)
    ]  # fmt: skip
    incidents = [replace(INCIDENT, id=t, subject=t, summary=t, facts=(t,), job_ids=()) for t in batch]
    metrics.show(builders.cluster(*jobs), {}, incidents)
    return metrics.text().decode()


@pytest.mark.parametrize("text_of", [agent_text, controller_text])
def test_it_is_no_series_and_no_label(text_of: Any) -> None:
    # Of the agent's labels only the job's number comes from a process, and is `other` if it is none.
    plain = {each for each in series(text_of(["plain text"] * BATCH)) if "created" not in each[0]}
    for batch in batches():
        batch = [text for text in batch if not JOB_ID.fullmatch(text)]  # which may be a number of a job
        found = {
            each
            for each in series(text_of((batch + ["plain text"] * BATCH)[:BATCH]))
            if "created" not in each[0]
        }
        assert found == plain


def test_folding_loses_no_name() -> None:
    for batch in batches():
        names = [text for text in batch if text]
        folded = "\n".join(fold(names))
        for name in names:
            if not re.search(r"\d$", name):
                assert name in folded
