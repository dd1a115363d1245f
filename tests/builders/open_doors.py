"""A controller with one incident full of marked words, and what each person is answered by each of its routes."""

from __future__ import annotations

import asyncio
import grp
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.config.agent import Security
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.api.routes import PAGE_ROUTES, ROUTES, Route
from slurm_watchdog.controller.api.web_page import make_page
from slurm_watchdog.controller.evidence.collection import Collected
from slurm_watchdog.controller.health.cluster import health
from slurm_watchdog.controller.health.job import HealthInputs
from slurm_watchdog.controller.incidents.judge import OpenIncidents
from slurm_watchdog.controller.policy.access import Operators, Person
from slurm_watchdog.diagnose.job import Diagnosis
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, ActionEnd, Decision, Operation, OperationOutcome, Verdict
from slurm_watchdog.model.documents import Delivery, Waiting
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.slurm import Reservation
from tests.builders import views
from tests.builders.evidence_rows import add_evidence
from tests.builders.node_past import a_ledger
from tests.builders.silences import Given

OWNER, OPERATOR, STRANGE, GROUP = 1501, 1700, 1600, 900
"""GROUP is the group of those who may use the socket, OPERATORS_GROUP that of operators."""
OPERATORS_GROUP = grp.getgrnam("daemon").gr_gid  # which every Linux has
PEOPLE = {
    "root": Person(0, frozenset({0})),
    "the controller's user": Person(os.geteuid(), frozenset({os.getegid()})),
    "an operator": Person(OPERATOR, frozenset({GROUP})),
    "a member of the operators' group": Person(1701, frozenset({GROUP, OPERATORS_GROUP})),
    "the owner": Person(OWNER, frozenset({GROUP})),
    "a stranger in the socket's group": Person(STRANGE, frozenset({GROUP})),
    "a stranger": Person(STRANGE + 1, frozenset({100})),
    "nobody knows who": Person(),
}
OPERATORS = Operators(frozenset({0, os.geteuid(), OPERATOR}), frozenset({OPERATORS_GROUP}))
NO_NODES: Mapping[str, str] = {}
MARK = "PLANTED"
"""In every word of a user: a log line, a frame, a path, a variable, a reason made of them."""


def incident(**changes: Any) -> Incident:
    whole: dict[str, Any] = {
        "id": "abc123", "kind": IncidentKind.LOG_ERROR, "subject": "job:7", "state": IncidentState.FIRING, "severity": Severity.CRITICAL,
        "job_ids": ("7",), "opened_at": 1_700_000_000.0, "pending_mono": 1.0, "fired_at": 1_700_000_001.0, "owners": (OWNER,),
        "summary": f"job 7: {MARK} line", "facts": (f"{MARK} fact",), "resolution": f"{MARK} again",
        "culprits": (Culprit(node="n1", rank=3, pid=9, path=f"/s/{MARK}", mount=f"/{MARK}", reason=f"{MARK} why"),),
    }  # fmt: skip
    return Incident(**whole | changes)


class Controller:
    """A controller with one incident, of which everything that a user can write is marked."""

    def __init__(self, path: Path) -> None:
        self.config = Config(cluster_name="c", security=Security(operators=(str(OPERATOR), "group:daemon")))
        self.journal = Journal(f"sqlite:///{path}/journal.sqlite")
        slurm_job = views.slurm_job(uid=OWNER, user="owner")
        blocked = views.blocked(60.0, path=f"/s/{MARK}", mount=f"/{MARK}")
        self.view = views.job(job=slurm_job, processes=(views.seen(0, blocked=blocked),))
        self.judge = SimpleNamespace(
            view=views.cluster(self.view, reporting_nodes=("n1",)),
            limits_s={},
            incidents=OpenIncidents([incident()]),
        )
        self.journal.save_incident(incident())
        self.journal.save_incident(incident(id="def456", state=IncidentState.RESOLVED))
        self.journal.add_note("abc123", 1.0, f"{MARK} note")
        add_evidence(self.journal, "abc123", 1.0, "diagnosis", {"summary": f"{MARK} stack"})
        add_evidence(
            self.journal,
            "abc123",
            1.0,
            "node",
            {"log_lines": [["/log", [MARK]]], "kernel_lines": ["a kernel line"]},
        )
        self._act()
        self.collected = Collected(
            id="c1", job=slurm_job, began=0.0, began_at=0.0, nodes={}, took_s=1.0,
            diagnosis=Diagnosis(job_id="7", is_hang=True, kind="busy", summary=f"{MARK} diagnosis"),
        )  # fmt: skip
        self.collected.finished.set()
        self.collector = SimpleNamespace(
            collect=lambda *_: self.collected,
            known=lambda each: self.collected if each == "c1" else None,
        )
        self.ledger = a_ledger(self.journal)
        self.ledger.note_incident(incident(kind=IncidentKind.GPU_FAULT, owners=(OWNER,)))
        self.silences = Given(self.judge.incidents, clock.wall(), self.journal).silences()
        self.state = SimpleNamespace(
            jobs={"7": slurm_job},
            people=(),
            reservations=(Reservation(name="maint", start_at=1.0, end_at=2.0, nodes=("n1",)),),
            job_view=lambda *_: self.view,
            node_addresses={},
            slurm_nodes=(),
            apply_job=lambda *_: None,
            left_out=SimpleNamespace(lately=lambda now: ()),
        )
        self.slurm = SimpleNamespace(read_job=self._job)
        failing = Delivery(channel="slack", failing_s=5.0, error=f"{MARK} answer", waiting=1)
        self.notifier = SimpleNamespace(deliveries=lambda: [failing])
        decision = SimpleNamespace(id="d9", verdict="allowed", by="rule", reason=f"{MARK} restart")
        self.decider = SimpleNamespace(
            why_left_alone=lambda job: "", ask_restart=lambda *_, **__: (incident(), decision)
        )
        self.health = lambda: health(
            HealthInputs(
                view=self.judge.view, limits_s={}, incidents=self.judge.incidents, mode="act", tick_age_s=1.0,
                acting={"7": "its requeue is under way"},
            )
        )  # fmt: skip
        self.started_at, self.last_tick, self.warm_up_began = 0.0, clock.monotonic(), 0.0
        self.journal_error = self.slurm_error = None
        self.slurm_notes = list[str]
        self.actions = SimpleNamespace(
            stuck=dict[str, str],
            waiting=lambda _: Waiting(what=f"{MARK} is waited for"),
            abandon=lambda *_: f"{MARK} is not there",
        )

    def left_out(self, now: float) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self.state.left_out.lately(now)
        return found

    def _act(self) -> None:
        decision = Decision(
            id="d1", incident_id="abc123", action=Action.GRACEFUL_RESTART, verdict=Verdict.ALLOWED, by="rule",
            reason=f"{MARK} decision", decided_at=1.0, kill_switch=f"/{MARK}",
        )  # fmt: skip
        self.journal.add_decision(decision)
        self.journal.add_decision(replace(decision, id="d2", incident_id="def456"))  # is under way
        operation = next(iter(Operation))
        self.journal.operation_intent("d1", operation, 1, 2.0, f"{MARK} operation")
        self.journal.operation_outcome("d1", operation, 1, OperationOutcome.FAILED, 3.0, f"{MARK} outcome")
        self.journal.end_action("d1", ActionEnd(ok=False, ended_at=4.0, detail=f"{MARK} end"))

    async def _job(self, _: str) -> Any:
        return self.view.job

    def blind(self, now: float) -> None:
        return None


BODIES = {
    "/v1/diagnose": {"job_id": "7"},
    "/v1/restart": {"job_id": "7", "reason": "x"},
    "/v1/pause": {"reason": "x"},
    "/v1/resume": {},
}
PLACES = {"/v1/diagnose/{id}": [{"id": "c1"}], "/v1/jobs/{id}": [{"id": "7"}]}
"""What stands for `{id}`; everywhere else the ids of incidents."""


def requests_of(routes: Iterable[Route]) -> list[tuple[str, str, Any]]:
    """(method, path, body) of every route, with every id that is there to be asked for."""
    found = []
    for route in routes:
        path = route.path.replace("{node}", "n1")
        ids = PLACES.get(path, [{"id": "abc123"}, {"id": "abc"}, {"id": "def456"}])
        for values in ids if "{id}" in path else [{}]:
            for number in ("1", "2") if "{number}" in path else ("",):
                found.append((route.method, path.format(**values, number=number), BODIES.get(path)))
    return list(dict.fromkeys((m, p, json.dumps(b)) for m, p, b in found))


async def ask(app: web.Application, routes: Iterable[Route], **headers: str) -> dict[str, tuple[int, str]]:
    """What every route answers to requests with these headers."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    answers = {}
    try:
        async with aiohttp.ClientSession(headers=headers) as session:
            for method, path, body in requests_of(routes):
                data = None if body == "null" else body
                async with session.request(method, base + path, data=data) as answer:
                    answers[f"{method} {path}"] = (answer.status, await answer.text())
    finally:
        await runner.cleanup()
    return answers


def doors(person: Person, path: Path, nodes: Mapping[str, str] = NO_NODES) -> dict[str, tuple[int, str]]:
    """What this person is answered by every route of the socket, and by every one of the page (which knows no uid).
    `nodes`: those that Slurm knows, with their addresses."""
    controller: Any = Controller(path)
    controller.state.node_addresses = dict(nodes)
    if person.uid is None:
        return asyncio.run(ask(make_page(controller, ""), PAGE_ROUTES))
    return asyncio.run(ask(make_app(controller, lambda request: person), ROUTES))
