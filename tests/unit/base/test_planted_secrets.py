"""A user's keys of every kind, planted in each kind of text, go the real way and are found nowhere.

The way: the agent's functions, its report, the judge, the journal, and from there every answer of socket and
page, the bundle, Slack, a webhook, Alertmanager, and the service's log. Rows are the table of kinds times the
places where text enters.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.evidence.last_lines import clean_end
from slurm_watchdog.agent.evidence.last_lines import parse_record as parse_kernel_record
from slurm_watchdog.agent.evidence.stacks import parse_dump
from slurm_watchdog.agent.logs.log_file import shown
from slurm_watchdog.agent.logs.step_rows import make_event
from slurm_watchdog.agent.processes.identify import parse_settings
from slurm_watchdog.base.log_setup import MaskingFormatter
from slurm_watchdog.base.redact import mask_cut, mask_words, masked
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.api.requests import MAX_REASON
from slurm_watchdog.controller.api.routes import PAGE_ROUTES, ROUTES
from slurm_watchdog.controller.api.web_page import make_page
from slurm_watchdog.controller.incidents.judge import Judge, OpenIncidents
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.evidence import NodeEvidence, RankEvidence, StackDump
from slurm_watchdog.model.incidents import Culprit, Finding, Incident, IncidentKind, Truth
from slurm_watchdog.model.observations import Blocked, Checkpoint, EventKind, NodeEvent, Process, Role
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import Report
from slurm_watchdog.notify.notification import Notice, Topic
from slurm_watchdog.notify.programs import alerts_json, event_json
from slurm_watchdog.notify.slack_messages import card
from slurm_watchdog.parse.kernel_log.line import parse_message
from slurm_watchdog.parse.training_log.text import LogFact
from slurm_watchdog.report.bundle import bundle_files
from tests.builders.evidence_rows import add_evidence
from tests.builders.notices import SITE
from tests.builders.open_doors import Controller, ask
from tests.builders.secret_samples import planted

ROOT = Person(0, frozenset({0}))


def agent_texts(text: str) -> dict[str, Any]:
    """What the agent's functions make of a secret in each place that they read."""
    fact = LogFact(kind=EventKind.ERROR, pattern="python_exception")
    frame = {
        "name": "load",
        "filename": f"/s/{text}/x.py",
        "short_filename": "",
        "line": 3,
        "module": None,
        "is_entry": False,
    }
    thread = {
        "pid": 1, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 1, "active": True, "owns_gil": False, "frames": [frame],
    }  # fmt: skip
    kernel = f"EXT4-fs error (device sda1): ext4_lookup: comm {text}"
    fact_of_kernel = parse_message(kernel, 3)
    return {
        "error line": shown(make_event(replace(fact, text=f"RuntimeError: {text}"), 1.0)).line,
        "log line": clean_end(f"before\n{text}\nafter\n".encode(), whole=True),
        "frames": parse_dump(json.dumps([thread]).encode()),
        "variables": parse_settings(b"TORCH_EXTRA=" + text.encode() + b"\0NCCL_SOCKET_IFNAME=eth0\0"),
        "kernel record": parse_kernel_record(f"3,1,1000,-;{kernel}".encode()),
        "kernel line": fact_of_kernel.message if fact_of_kernel is not None else "",
    }


def report_of(text: str, read: dict[str, Any]) -> Report:
    """What leaves the agent: evidence, a blocked thread's path, a checkpoint's, a reason why something
    failed, a kernel line."""
    blocked = Blocked(thread_id=1, seconds=60.0, state="D", path=f"/s/{text}/x", mount="/s", device=text)
    process = Process(
        pid=1, start_ticks=2, job_id="7", role=Role.RANK, comm="python", state="D", uid=1501, blocked=blocked
    )
    rank = RankEvidence(
        pid=1, start_ticks=2, role=Role.RANK, rank=0, blocked=blocked, environment=tuple(read["variables"].items()),
        dumps=(StackDump(after_s=0.0, threads=read["frames"]),), error=text,
    )  # fmt: skip
    evidence = NodeEvidence(
        node="n1", job_id="7", ranks=(rank,), log_lines=((f"/log/{text}", tuple(read["log line"])),),
        kernel_lines=(read["kernel record"] or "",), problems=(text,),
    )  # fmt: skip
    checkpoint = Checkpoint(job_id="7", directory=f"/c/{text}", path=f"/c/{text}/step5", error=text)
    return masked(
        Report(
            node="n1",
            boot_id="b",
            agent_id="a",
            sequence=1,
            processes=(process,),
            checkpoints=(checkpoint,),
            problems=(text,),
            node_events=(
                NodeEvent(source="kernel_log", name="x", severity="error", age_s=1.0, line=read["kernel line"]),
            ),  # type: ignore[arg-type]
            results=(CommandResult(command_id="c", ok=False, error=text, evidence=evidence),),
        )
    )


def incident_of(text: str, read: dict[str, Any], report: Report) -> Incident:
    """What the judge makes of a finding whose words are the job's name, lines, paths and directives."""
    blocked = report.processes[0].blocked
    finding = Finding(
        kind=IncidentKind.LOG_ERROR, subject="job:7", truth=Truth.BAD, job_ids=("7",),
        summary=f"job 7 ({mask_words(text)}): {read['error line']}; its output is /out/{text}",
        facts=(read["kernel line"], f"file {blocked.path if blocked else ''}", f"it asked for {text}"),
        culprits=(Culprit(node="n1", path=f"/s/{text}", reason=read["error line"]),),
    )  # fmt: skip
    state = ClusterState(silent_after_s=60, report_lifetime_s=60)
    judge = Judge(Config(cluster_name="c"), state, (), lambda: "abc123")
    (change,) = judge.conclude([finding], 100.0, 1000.0)
    return change.after


def every_exit(text: str, directory: Path) -> dict[str, str]:
    """Everything that is kept, shown and sent of it, by where."""
    read = agent_texts(text)
    report = report_of(text, read)
    incident = incident_of(text, read, report)
    reason = mask_cut(f"because {text}", MAX_REASON)
    controller: Any = Controller(directory)
    controller.judge.incidents = OpenIncidents([incident])
    journal = controller.journal
    journal.save_incident(incident)
    add_evidence(journal, "abc123", 1.0, "node", msgspec.to_builtins(report.results[0].evidence))
    journal.add_note("abc123", 1.0, incident.summary)
    journal.pause(reason, "root", 1.0)
    answers = asyncio.run(ask(make_app(controller, lambda _: ROOT), ROUTES))
    journal.pause(reason, "root", 2.0)
    shown = asyncio.run(ask(make_page(controller, "", Person(knows_password=True)), PAGE_ROUTES))
    answers |= {f"page {route}": answer for route, answer in shown.items()}
    explanation = json.loads(answers["GET /v1/incidents/abc123"][1])
    numbers = [each["number"] for each in explanation["evidence"]]
    documents = {number: json.loads(journal.evidence.document("abc123", number) or b"null") for number in numbers}
    notice = Notice(topic=Topic.OPENED, incident=incident, at=1.0)
    record = logging.LogRecord("slurm_watchdog", logging.WARNING, "x.py", 1, "incident: %s", (text,), None)
    found = {route: body for route, (_, body) in answers.items()}
    found |= {
        f"bundle {name}": data.decode(errors="replace")
        for name, data in bundle_files(explanation, lambda piece: documents[piece["number"]])
    }
    found |= {
        "report": msgspec.json.encode(report).decode(), "agent": repr({name: each for name, each in read.items() if name != "frames"}), "webhook": json.dumps(event_json(notice, SITE), default=str),
        "alertmanager": json.dumps(alerts_json(notice, SITE)), "slack": json.dumps(card([notice], SITE)),
        "log": MaskingFormatter("%(message)s").format(record), "reason": reason,
    }  # fmt: skip
    journal.close()
    for file in directory.iterdir():
        found[f"file {file.name}"] = file.read_bytes().decode("utf-8", "replace")
    return found


ROWS = planted(11)


@pytest.mark.parametrize("at", range(0, len(ROWS), 16))
def test_a_secret_planted_in_each_kind_of_text_is_found_in_nothing_that_is_kept_shown_or_sent(
    at: int, tmp_path: Path
) -> None:
    for number, (kind, text, secrets) in enumerate(ROWS[at : at + 16]):
        place = tmp_path / str(number)
        place.mkdir()
        exits = every_exit(text, place)
        assert not [(kind, where) for where, seen in exits.items() for secret in secrets if secret in seen]
        assert len(exits) > 20


def test_without_the_masks_the_same_secrets_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above cannot pass for want of a way."""
    plain = "quite an ordinary text of 0123456789 characters"
    exits = every_exit(plain, tmp_path)
    assert {where for where, seen in exits.items() if plain in seen} >= {
        "report", "agent", "webhook", "alertmanager", "slack", "log", "reason", "GET /v1/incidents/abc123", "page GET /v1/incidents/abc123",
        "bundle incident.json",
    }  # fmt: skip
