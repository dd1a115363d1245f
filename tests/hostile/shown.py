"""What each thing that shows text does with a batch of it. Every function raises AssertionError for what is
active, or more than text."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from slurm_watchdog.agent.metrics import JOB_ID, AgentMetrics
from slurm_watchdog.base.loop import Isolated
from slurm_watchdog.cli.status import frame, screen
from slurm_watchdog.cli.terminal import STYLES, clean
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.model.documents import Status
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Blocked
from slurm_watchdog.model.report import Report
from slurm_watchdog.notify.notification import JobNote, Notice, Site, Topic
from slurm_watchdog.notify.programs import alerts_json, event_json
from slurm_watchdog.notify.slack_messages import Digest, Payload, card, listing, reply, updated
from tests.builders import views
from tests.builders.notices import DECISION, FAILED, INCIDENT, replace
from tests.builders.slack_server import shown as texts_of
from tests.builders.slack_server import too_long
from tests.hostile.text import BATCH, is_quiet, well_formed

PLAIN = ["plain text"] * BATCH
OURS = re.compile(rf"\x1b\[(?:0|{'|'.join(set(STYLES.values()))})m")
"""Colours of a template's own."""


def slack(batch: list[str]) -> None:
    """Every message that holds it is plain text without a mention, a link or an escape that is not ours, and
    of a size that Slack takes."""
    digest = Digest(Site(cluster="a"))
    for text in batch:
        told, site = story(text), Site(cluster=text)
        check_slack(card(told, site))
        check_slack(updated(told, site))
        check_slack(reply(told, site))
        for notice in told:
            digest.add(notice)
    for message in (digest.message("c"), listing(batch[0], batch, "end")):
        check_slack(message)


def programs(batch: list[str]) -> None:
    """A webhook's JSON is ASCII and says what was meant; an alert's labels are bounded and quiet."""
    for text in batch:
        for notice in story(text):
            sent = json.dumps(event_json(notice, Site(cluster=text)))
            assert sent.isascii()
            assert json.loads(sent)["incident"]["subject"] == text
        (alert,) = alerts_json(story(text)[0], Site(cluster=text))
        check_quiet(*alert["labels"].values())
        check_quiet(*alert["annotations"].values(), lines=True)
        assert set(alert["labels"]) <= {"alertname", "cluster", "kind", "severity", "incident", "job_id"}


def terminal(batch: list[str]) -> None:
    """No cursor moves, no colour changes, no line begins, on the screen of `status --watch` and in tables."""
    for text in batch:
        assert is_quiet(clean(text))
    batch = [well_formed(text) for text in batch]  # it comes as JSON, in which these are refused
    document = {
        "mode": "observe", "controller": {}, "slurm": {}, "nodes": {"reporting": batch, "silent": batch},
        "incidents": {"firing": 1}, "open": [{"id": t, "kind": t, "state": "firing", "summary": t} for t in batch],
        "jobs": [{"job_id": t, "name": t, "user": t, "phase": t, "nodes": [t]} for t in batch],
    }  # fmt: skip
    status = msgspec.convert(document, Status)
    drawn = frame(status, 200, 60, "".join(map(clean, batch)))
    assert len(drawn) <= 60
    for line in [*drawn, *screen(status, None)]:
        assert is_quiet(OURS.sub("", line))


def metrics(batch: list[str]) -> None:
    """Neither a series nor a label more than plain text makes."""
    strange = [text for text in batch if not JOB_ID.fullmatch(text)]  # which may be a number of a job
    filled = (strange + PLAIN)[:BATCH]
    for text_of in (agent_text, controller_text):
        assert series(text_of(filled)) == series(text_of(PLAIN))


CHANNELS = {"slack": slack, "programs": programs, "terminal": terminal, "metrics": metrics}


def check_slack(message: Payload) -> None:
    """Raises AssertionError for a message that is more than text, or that Slack would refuse."""
    for _, text in texts_of(message):
        assert text["type"] == "plain_text"
        assert text["emoji"] is False
        _check_escaped(text["text"])
    _check_escaped(message["text"])
    assert (message["link_names"], message["unfurl_links"], message["unfurl_media"]) == (False, False, False)
    assert not too_long(message)


def _check_escaped(text: str) -> None:
    check_quiet(text, lines=True)
    assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", text)


def check_quiet(*texts: str, lines: bool = False) -> None:
    """Raises AssertionError for one that moves, hides or turns anything; our own sign for such a character
    may stand in it."""
    for text in texts:
        assert is_quiet(text.replace("\N{REPLACEMENT CHARACTER}", ""), lines=lines)


def story(text: str) -> list[Notice]:
    """An incident from its beginning to its end, with the text wherever a text may stand."""
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
        Notice(
            topic=Topic.DECIDED,
            decision=replace(DECISION, reason=text, by=text, exclude=(text,), asked_by=text),
            **common,
        ),
        Notice(topic=Topic.ENDED, run=failed, **common),
        Notice(topic=Topic.RESOLVED, **common),
    ]


def series(text: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """(name, labels) of what Prometheus would store; its own parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "created" not in sample.name
    }


def agent_text(batch: list[str]) -> str:
    """What an agent serves that has seen as many processes."""
    metrics = AgentMetrics()
    blocked = Blocked(thread_id=1, seconds=5.0, state="D", syscall="write", path="/x", mount="/x")
    report = Report(
        node="n1", boot_id="b", agent_id="a", sequence=1,
        processes=tuple(
            views.process(0, job_id=text, comm=text, pid=number + 1, blocked=replace(blocked, path=text, mount=text))
            for number, text in enumerate(batch)
        ),
    )  # fmt: skip
    metrics.update(report, Isolated(), 0)
    return metrics.render().decode()


def controller_text(batch: list[str]) -> str:
    """What the controller serves that knows as many jobs and incidents."""
    metrics = ControllerMetrics()
    jobs = [
        views.job(
            job=views.slurm_job(job_id=str(n), name=t, user=t, partition=t, account=t, comment=t, workdir=t, stdout=t)
        )
        for n, t in enumerate(batch)
    ]
    incidents = [replace(INCIDENT, id=t, subject=t, summary=t, facts=(t,), job_ids=()) for t in batch]
    metrics.show(views.cluster(*jobs), {}, incidents, {}, lambda each: False)
    return metrics.text().decode()
