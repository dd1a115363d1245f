"""Who may see what: every answer of the local socket and of the page, for everybody who may ask."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slurm_watchdog.controller.api.answers import without_kernel_lines
from slurm_watchdog.controller.api.asking import operators_of
from slurm_watchdog.controller.api.doors import make_app, peer_person
from slurm_watchdog.controller.api.routes import PAGE_ROUTES
from slurm_watchdog.controller.api.web_page import make_page
from slurm_watchdog.controller.incidents.judge import OpenIncidents
from slurm_watchdog.controller.policy.access import Operators, Person, may_see, public_sentence
from slurm_watchdog.detect.registry import KINDS, spec_of
from slurm_watchdog.journal.evidence import pack
from slurm_watchdog.model.incidents import NOBODY, Culprit
from slurm_watchdog.report.bundle import bundle_files
from tests.builders.open_doors import (
    MARK,
    OPERATOR,
    OPERATORS,
    OPERATORS_GROUP,
    OWNER,
    PEOPLE,
    STRANGE,
    Controller,
    ask,
    doors,
    incident,
)

STRANGERS = ("a stranger in the socket's group", "a stranger", "nobody knows who")


@pytest.mark.parametrize("who", PEOPLE)
def test_a_stranger_s_answers_have_no_word_of_a_user_and_everybody_else_s_do(who: str, tmp_path: Path) -> None:
    answers = doors(PEOPLE[who], tmp_path)
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
            "GET /v1/incidents/abc123/evidence/2", "POST /v1/diagnose", "GET /v1/diagnose/c1", "GET /v1/nodes/n1",
        } <= telling  # fmt: skip


def test_the_page_with_its_password_gives_what_it_does_not_give_without(tmp_path: Path) -> None:
    controller: Any = Controller(tmp_path)
    answers = asyncio.run(ask(make_page(controller, "a password"), PAGE_ROUTES, Authorization="Bearer a password"))
    assert {route for route, (_, text) in answers.items() if MARK in text} >= {
        "GET /v1/overview", "GET /v1/incidents", "GET /v1/incidents/abc123", "GET /v1/incidents/abc123/evidence/2",
        "GET /v1/jobs/7",
    }  # fmt: skip


SHARED: dict[str, Any] = {
    "summary": "rank 3 stands in its loader", "groups": [], "culprits": [], "is_hang": True, "class": "c", "kind": "busy",
    "taken_at": 14.0,
}  # fmt: skip


def test_explain_page_and_bundle_of_two_incidents_show_the_same_stacks_to_those_who_may_see_both(
    tmp_path: Path,
) -> None:
    """Incident `second` shares a collection that is stored with `first`, which is also about a job of somebody else."""
    controller: Any = Controller(tmp_path)
    node = {"node": "n1", "job_id": "7", "ranks": [{"pid": 9, "role": "rank", "rank": 3, "comm": "python"}]}
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
    shown, of_first = asyncio.run(answers(page, "/v1/incidents/second", "/v1/incidents/first"))
    stacks, of_first = (
        next(each for each in answer["evidence"] if each["kind"] == "diagnosis") for answer in (shown, of_first)
    )
    assert stacks["document"] == of_first["document"] == SHARED
    assert (stacks["taken"], of_first["taken"]) == (
        "taken 4 s after the incident began", "taken 2 s after the incident began",
    )  # fmt: skip

    def fetch(piece: Any) -> Any:
        return asyncio.run(answers(door(), f"/v1/incidents/{piece['incident']}/evidence/{piece['number']}"))[0]

    bundle = dict(bundle_files(told, fetch))
    assert "stacks/n1/rank-3.txt" in bundle
    assert json.loads(bundle["diagnosis.json"]) == SHARED
    (owner_s,) = asyncio.run(answers(make_app(controller, lambda _: Person(OWNER)), "/v1/incidents/second"))
    assert owner_s["incident"]["summary"] == incident().summary
    assert owner_s["evidence"] == [], "what is stored with an incident of two users is for operators"


def test_the_lines_of_a_node_s_kernel_are_for_operators(tmp_path: Path) -> None:
    route = "GET /v1/incidents/abc123/evidence/2"
    told = {
        who: "a kernel line" in doors(person, tmp_path / str(at))[route][1]
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
