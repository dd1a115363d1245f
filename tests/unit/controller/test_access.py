"""Who may see what: every answer of the local socket and of the page, for everybody who may ask."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slurm_watchdog.base import clock
from slurm_watchdog.cli import client as cli_client
from slurm_watchdog.cli.bundle import bundle_files
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.api.local_socket import make_app, without_kernel_lines
from slurm_watchdog.controller.api.operators import operators_of
from slurm_watchdog.controller.api.web_page import make_page
from slurm_watchdog.controller.health.cluster import HealthInputs, health
from slurm_watchdog.controller.incidents.open_limit import OpenIncidents
from slurm_watchdog.controller.policy.access import STRANGER, Operators, Person, may_see, public_sentence
from slurm_watchdog.controller.state.evidence_collection import Collected
from slurm_watchdog.detect.registry import KINDS, spec_of
from slurm_watchdog.diagnose.diagnosis import Diagnosis
from slurm_watchdog.journal.compress import pack
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, ActionEnd, Decision, Operation, OperationOutcome, Verdict
from slurm_watchdog.model.incidents import NOBODY, Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.notify.notification import Delivery
from tests.builders import views
from tests.builders.evidence_rows import add_evidence

OWNER, OPERATOR, STRANGE, GROUP = 1501, 1700, 1600, 900
"""GROUP is the group of those who may use the socket, OPERATORS_GROUP that of operators."""
OPERATORS_GROUP = 901
PEOPLE = {
    "root": Person(0, frozenset({0})),
    "the controller's user": Person(os.geteuid(), frozenset({os.getegid()})),
    "an operator": Person(OPERATOR, frozenset({GROUP})),
    "a member of the operators' group": Person(1701, frozenset({GROUP, OPERATORS_GROUP})),
    "the owner": Person(OWNER, frozenset({GROUP})),
    "a stranger in the socket's group": Person(STRANGE, frozenset({GROUP})),
    "a stranger": Person(STRANGE + 1, frozenset({100})),
    "nobody knows who": STRANGER,
}
STRANGERS = ("a stranger in the socket's group", "a stranger", "nobody knows who")
OPERATORS = Operators(frozenset({0, os.geteuid(), OPERATOR}), frozenset({OPERATORS_GROUP}))
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
        self.config = Config.model_validate({"cluster_name": "c"})
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
        self.state = SimpleNamespace(
            job_view=lambda *_: self.view,
            node_addresses={},
            apply_job=lambda *_: None,
            left_out=SimpleNamespace(lately=lambda now: ()),
        )
        self.slurm = SimpleNamespace(read_job=self._job)
        failing = Delivery(channel="slack", failing_s=5.0, error=f"{MARK} answer", waiting=1)
        self.notifier = SimpleNamespace(deliveries=lambda: [failing])
        decision = SimpleNamespace(id="d9", verdict="allowed", by="rule", reason=f"{MARK} restart")
        self.decider = SimpleNamespace(ask_restart=lambda *_, **__: (incident(), decision))
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
            stuck=list[str],
            waiting=lambda _: (f"{MARK} is waited for", None),
            abandon=lambda *_: f"{MARK} is not there",
        )

    def _act(self) -> None:
        decision = Decision(
            id="d1", incident_id="abc123", action=Action.GRACEFUL_RESTART, verdict=Verdict.ALLOWED, by="rule",
            reason=f"{MARK} decision", decided_at=1.0, kill_switch=f"/{MARK}",
        )  # fmt: skip
        self.journal.add_decision(decision)
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
PLACES = {"/v1/diagnose/{id}": [{"id": "c1"}], "/api/jobs/{id}": [{"id": "7"}]}
"""What stands for `{id}`; everywhere else the ids of incidents."""


def requests_of(app: web.Application) -> list[tuple[str, str, Any]]:
    """(method, path, body) of every route, with every id that is there to be asked for."""
    found = []
    for route in app.router.routes():
        if route.method != "HEAD":
            path = route.resource.canonical if route.resource else ""
            ids = PLACES.get(path, [{"id": "abc123"}, {"id": "abc"}, {"id": "def456"}])
            for values in ids if "{id}" in path else [{}]:
                for number in ("1", "2") if "{number}" in path else ("",):
                    found.append((route.method, path.format(**values, number=number), BODIES.get(path)))
    return list(dict.fromkeys((m, p, json.dumps(b)) for m, p, b in found))


async def ask(app: web.Application) -> dict[str, tuple[int, str]]:
    """What every route answers."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    answers = {}
    try:
        async with aiohttp.ClientSession() as session:
            for method, path, body in requests_of(app):
                data = None if body == "null" else body
                async with session.request(method, base + path, data=data) as answer:
                    answers[f"{method} {path}"] = (answer.status, await answer.text())
    finally:
        await runner.cleanup()
    return answers


def doors(person: Person, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str]]:
    """What this person is answered by every route of the socket, and by every one of the page (which knows no uid)."""
    controller: Any = Controller(path)
    monkeypatch.setattr("slurm_watchdog.controller.api.local_socket.operators_of", lambda names: OPERATORS)
    monkeypatch.setattr("slurm_watchdog.controller.api.local_socket.peer_of", lambda request: (person.uid, "somebody"))
    page = make_page(controller, "")
    if person.uid is None:
        return asyncio.run(ask(page))
    return asyncio.run(ask(make_app(controller, lambda request: person)))


@pytest.mark.parametrize("who", PEOPLE)
def test_a_stranger_s_answers_have_no_word_of_a_user_and_everybody_else_s_do(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = doors(PEOPLE[who], tmp_path, monkeypatch)
    telling = {route for route, (_, text) in answers.items() if MARK in text}
    assert not [text for status, text in answers.values() if status == 500], answers
    if who in STRANGERS:
        assert telling == set()
        assert [route for route, (status, _) in answers.items() if status == 200], "he is told something"
        seen = next(text for route, (_, text) in answers.items() if route.endswith("/incidents/abc123"))
        assert "A log has an error on n1 (job 7)." in seen
    else:
        assert {
            "GET /v1/status", "GET /v1/incidents", "GET /v1/incidents/abc123", "GET /v1/incidents/abc123/evidence/1",
            "GET /v1/incidents/abc123/evidence/2", "POST /v1/diagnose", "GET /v1/diagnose/c1",
        } <= telling  # fmt: skip


def test_the_page_with_its_password_gives_what_it_does_not_give_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller: Any = Controller(tmp_path)
    monkeypatch.setattr("slurm_watchdog.controller.api.web_page._knows", lambda authorization, token: True)
    answers = asyncio.run(ask(make_page(controller, "a password")))
    assert {route for route, (_, text) in answers.items() if MARK in text} >= {
        "GET /api/overview", "GET /api/incidents", "GET /api/incidents/abc123", "GET /api/incidents/abc123/evidence/2",
        "GET /api/jobs/7",
    }  # fmt: skip


SHARED: dict[str, Any] = {
    "summary": "rank 3 stands in its loader", "groups": [], "culprits": [], "is_hang": True, "class": "c", "kind": "busy",
    "taken_at": 14.0,
}  # fmt: skip


def test_explain_page_and_bundle_of_two_incidents_show_the_same_stacks_to_those_who_may_see_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident `second` shares a collection that is stored with `first`, which is also about a job of somebody else."""
    controller: Any = Controller(tmp_path)
    node = {"node": "n1", "job_id": "7", "ranks": [{"pid": 9, "role": "rank", "rank": 3, "comm": "python"}]}
    monkeypatch.setattr("slurm_watchdog.controller.api.local_socket.operators_of", lambda names: OPERATORS)
    first = incident(id="first", owners=(OWNER, STRANGE), opened_at=12.0)
    controller.judge.incidents = OpenIncidents([first, incident(id="second", opened_at=10.0)])
    for each in controller.judge.incidents:
        controller.journal.save_incident(each)
    for kind, document in (("node", node), ("diagnosis", SHARED), ("node", {"of": "another collection"})):
        collection = "other" if "of" in document else "c1"
        packed = pack(json.dumps(document).encode())
        controller.journal.evidence.add("first", 15.0, kind, packed, collection)
    for _ in range(2):
        controller.journal.evidence.share("second", "c1", "first")

    async def answers(app: web.Application, *paths: str) -> list[Any]:
        async with TestClient(TestServer(app)) as client:
            return [await (await client.get(path)).json() for path in paths]

    def door() -> web.Application:
        return make_app(controller, lambda _: Person(OPERATOR))

    page = make_page(controller, "", Person(knows_password=True))
    (told,) = asyncio.run(answers(door(), "/v1/incidents/second"))
    assert [(each["kind"], each["incident"]) for each in told["evidence"]] == [
        ("node", "first"),
        ("diagnosis", "first"),
    ]
    assert told["evidence"][1]["document"] == SHARED
    assert told["evidence"][1]["taken"] == "taken 4 s after the incident began"
    shown, of_first = asyncio.run(answers(page, "/api/incidents/second", "/api/incidents/first"))
    assert shown["diagnosis"] == of_first["diagnosis"] == SHARED
    assert (shown["taken"], of_first["taken"]) == (
        "taken 4 s after the incident began", "taken 2 s after the incident began",
    )  # fmt: skip

    class Client(cli_client.Client):
        def __init__(self) -> None:
            pass

        def evidence(self, incident_id: str, number: int) -> Any:
            return asyncio.run(answers(door(), f"/v1/incidents/{incident_id}/evidence/{number}"))[0]

    bundle = dict(bundle_files(told, lambda piece: Client().piece(told, piece)))
    assert "stacks/n1/rank-3.txt" in bundle
    assert json.loads(bundle["diagnosis.json"]) == SHARED
    (owner_s,) = asyncio.run(answers(make_app(controller, lambda _: Person(OWNER)), "/v1/incidents/second"))
    assert owner_s["incident"]["summary"] == incident().summary
    assert owner_s["evidence"] == [], "what is stored with an incident of two users is for operators"


def test_the_lines_of_a_node_s_kernel_are_for_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    route = "GET /v1/incidents/abc123/evidence/2"
    told = {
        who: "a kernel line" in doors(person, tmp_path / str(at), monkeypatch)[route][1]
        for at, (who, person) in enumerate(PEOPLE.items())
        if person.uid is not None and (tmp_path / str(at)).mkdir() is None
    }
    assert {who for who, seen in told.items() if seen} == {
        "root", "the controller's user", "an operator", "a member of the operators' group",
    }  # fmt: skip
    assert without_kernel_lines(b"[1]") == b"[1]"


@pytest.mark.parametrize(
    ("owners", "person", "sees"),
    [
        ((OWNER,), Person(OWNER), True),
        ((OWNER,), Person(STRANGE), False),
        ((OWNER, STRANGE), Person(OWNER), False),
        ((OWNER, STRANGE), Person(0), True),
        ((), Person(OWNER), False),
        ((), Person(OPERATOR), True),
        ((NOBODY,), Person(NOBODY), False),
        ((OWNER,), Person(), False),
        ((OWNER,), Person(STRANGE, frozenset({OPERATORS_GROUP})), True),
        ((OWNER,), Person(knows_password=True), True),
    ],
)
def test_evidence_is_for_its_only_owner_and_for_operators(owners: tuple[int, ...], person: Person, sees: bool) -> None:
    assert may_see(owners, person, OPERATORS) is sees


def test_an_operator_s_name_that_this_machine_does_not_know_is_logged_and_lets_nobody_see(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = operators_of(["root", "1700", "group:root", "no-such-user", "group:no-such-group"])
    assert found == Operators(frozenset({0, os.geteuid(), 1700}), frozenset({0}))
    assert [word in caplog.text for word in ("user 'no-such-user'", "group 'no-such-group'")] == [True, True]


def test_every_kind_of_incident_has_a_sentence_for_everybody() -> None:
    assert all(spec_of(kind).sentence[0].isupper() for kind in KINDS)
    many = incident(
        job_ids=tuple(str(each) for each in range(20)),
        culprits=tuple(Culprit(node=f"n{each}", reason=MARK) for each in range(20)),
    )
    assert MARK not in public_sentence(many)
    assert "and 12 more" in public_sentence(many)


def test_who_asks_is_known_from_the_kernel_with_all_groups(tmp_path: Path) -> None:
    async def run() -> Person:
        from slurm_watchdog.controller.api.local_socket import peer_person

        found: list[Person] = []

        async def handler(request: web.Request) -> web.Response:
            found.append(peer_person(request))
            return web.Response()

        app = web.Application()
        app.router.add_get("/", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        path = str(tmp_path / "s")
        await web.UnixSite(runner, path).start()
        await asyncio.to_thread(_get, path)
        await runner.cleanup()
        return found[0]

    person = asyncio.run(run())
    assert person == Person(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))


def _get(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        sock.recv(100)
