"""Who may use a command: root, the controller's user, the owner, those whom the site names, and what Slurm knows of them."""

from __future__ import annotations

import asyncio
import pwd
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace
from yarl import URL

from slurm_watchdog.base import clock
from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.api.requests import MAX_ADDED_A_DAY
from slurm_watchdog.controller.api.routes import ROUTES
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.model.incidents import Silence
from slurm_watchdog.model.node_events import NodeEvent
from slurm_watchdog.model.slurm import SlurmPerson
from slurm_watchdog.slurm.command_line import parse_people
from slurm_watchdog.slurm.node_names import ParseError
from tests.builders.asking import asked
from tests.builders.open_doors import OWNER, STRANGE, Controller

DAEMON = pwd.getpwnam("daemon").pw_uid
ASKED = {
    "pause": ("/v1/pause", {}),
    "restart": ("/v1/restart", {"job_id": "7"}),
    "silence": ("/v1/silences", {"nodes": ["n1"], "for_s": 60.0}),
    "mend": ("/v1/nodes/n1/events", {"kind": "mended", "id": "x", "what": "a new fan"}),
}


def status(tmp_path: Path, person: Person, command: str, names: list[str], *people: SlurmPerson) -> int:
    """What somebody is answered to a command for which `security.may` has these names; job 7 is of account vision."""
    controller: Any = Controller(tmp_path)
    controller.config = parse_config(f"security: {{may: {{{command}: {names}}}}}\n")
    controller.state.people = people
    controller.state.node_addresses = {"n1": "1.2.3.4"}
    controller.view = replace(controller.view, job=replace(controller.view.job, account="vision"))
    controller.state.jobs = {"7": controller.view.job}
    path, body = ASKED[command]

    async def ask() -> int:
        async with TestClient(TestServer(make_app(controller, lambda _: person))) as client:
            return (await client.post(path, json=body)).status

    return asyncio.run(ask())


@pytest.mark.parametrize("command", ASKED)
def test_a_command_is_for_root_and_for_those_that_the_site_names(tmp_path: Path, command: str) -> None:
    for number, (person, names, may) in enumerate(
        [
            (Person(0), [], True),
            (Person(STRANGE), [], False),
            (Person(STRANGE), [str(STRANGE)], True),
            (Person(STRANGE, frozenset({DAEMON})), ["group:daemon"], True),
            (Person(STRANGE), ["group:daemon", "daemon"], False),
            (Person(DAEMON), ["daemon"], True),
            (Person(OWNER), [], command == "restart"),
        ]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        assert status(place, person, command, names) == (200 if may else 403), (person, names)


def test_one_command_gives_no_other(tmp_path: Path) -> None:
    controller: Any = Controller(tmp_path)
    controller.config = parse_config(f"security: {{may: {{restart: ['{STRANGE}']}}}}\n")

    async def ask() -> list[int]:
        async with TestClient(TestServer(make_app(controller, lambda _: Person(STRANGE)))) as client:
            return [(await client.post(path, json=body)).status for path, body in ASKED.values()]

    assert asyncio.run(ask())[:3] == [403, 200, 403]


@pytest.mark.parametrize(
    ("names", "person", "may"),
    [
        (["slurm:operator"], SlurmPerson(user="daemon", is_operator=True), True),
        (["slurm:operator"], SlurmPerson(user="daemon", coordinates=("vision",)), False),
        (["slurm:operator"], SlurmPerson(user="other", is_operator=True), False),
        (["slurm:coordinator"], SlurmPerson(user="daemon", coordinates=("text", "vision")), True),
        (["slurm:coordinator"], SlurmPerson(user="daemon", coordinates=("text",)), False),
        (["slurm:coordinator"], SlurmPerson(user="daemon", is_operator=True), False),
    ],
)
def test_what_somebody_is_in_slurms_accounting_counts(
    tmp_path: Path, names: list[str], person: SlurmPerson, may: bool
) -> None:
    assert status(tmp_path, Person(DAEMON), "restart", names, person) == (200 if may else 403)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{stop: [ann]}", "known: pause, restart"),
        ("{restart: ['slurm:admin']}", "not one of slurm:operator, slurm:coordinator"),
        ("{pause: ['slurm:coordinator']}", "concerns jobs of an account"),
        ("{restart: ann}", "list"),
    ],
)
def test_a_right_that_nobody_can_have_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"security: {{may: {text}}}\n")
    assert words in "\n".join(caught.value.lines()), caught.value.lines()


def test_accounting_is_read_as_sacctmgr_prints_it() -> None:
    people = parse_people("root|Administrator|\nann|None|vision,text\nbob|None|\neve|Operator|text\n")
    assert people == (
        SlurmPerson(user="root", is_operator=True),
        SlurmPerson(user="ann", coordinates=("vision", "text")),
        SlurmPerson(user="eve", is_operator=True, coordinates=("text",)),
    )
    assert parse_people("") == ()
    with pytest.raises(ParseError):
        parse_people("sacctmgr: error: you are not running a supported accounting_storage plugin\n")


CHANGES: dict[str, dict[str, Any]] = {
    "/v1/diagnose": {"job_id": "7"},
    "/v1/nodes/{node}/events": {"kind": "mended", "id": "x", "what": "a new fan"},
    "/v1/pause": {},
    "/v1/restart": {"job_id": "7"},
    "/v1/restart/cancel": {"job_id": "7"},
    "/v1/resume": {},
    "/v1/silences": {"nodes": ["n1"], "for_s": 60.0},
    "/v1/silences/{id}/end": {},
}
OF_EACH_JOB = {"/v1/requests", "/v1/requests/progress"}
"""Answer for each job by itself: tests/unit/controller/test_save_api.py."""


@pytest.mark.parametrize("path", sorted(CHANGES))
def test_whatever_changes_something_is_refused_to_a_stranger_and_not_to_root(tmp_path: Path, path: str) -> None:
    answers = {}
    for person in (Person(0), Person(STRANGE)):
        place = tmp_path / str(person.uid)
        place.mkdir()
        controller: Any = Controller(place)
        controller.state.node_addresses = {"n1": "1.2.3.4"}
        silence = Silence(id="s1", by="root", at=clock.wall(), until=clock.wall() + 60.0, nodes=("n1",))
        controller.silences.add(silence)
        ids = {"/v1/silences/{id}/end": "s1"}
        target = path.format(id=ids.get(path, "abc123"), node="n1")
        ((status, document),) = asked(controller, person, ("POST", target, CHANGES[path]))
        answers[person.uid] = status
        assert status == 200 or document["error"], document
    assert answers[STRANGE] == 403 and answers[0] in (200, 409), answers


def test_no_request_that_changes_something_lacks_its_test_here() -> None:
    assert {each.path for each in ROUTES if each.method != "GET"} == set(CHANGES) | OF_EACH_JOB


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/v1/nothing", None, 404, "GET /v1/nothing is not a request that is answered here"),
        ("GET", "/", None, 404, "not a request"),
        ("GET", "/v1/pause", None, 405, "GET /v1/pause is not a request"),
        ("DELETE", "/v1/status", None, 405, "not a request"),
        ("POST", "/v1/pause", "{", 400, "is not JSON"),
        ("POST", "/v1/pause", '{"x": ' + "[" * 60_000, 400, "is not JSON"),
        ("POST", "/v1/pause", '{"reason": ' + "9" * 60_000 + "}", 400, "out of range"),
        ("POST", "/v1/pause", b'{"reason": "\xff"}', 400, "is not JSON"),
        ("POST", "/v1/pause", "[]", 400, "Expected `object`"),
        ("POST", "/v1/pause", "x" * 70_000, 413, "too large"),
        ("POST", "/v1/requests/progress", '{"incident_ids": ["\\ud800"]}', 400, "is not JSON"),
        ("GET", "/v1/incidents/%ff%00", None, 404, "there is no incident"),
        ("GET", "/v1/report?from=nan", None, 400, "has to be a date"),
        ("GET", "/v1/incidents?job=%ed%a0%80", None, 200, ""),
    ],
)
def test_a_request_that_nobody_can_serve_is_answered_in_json(
    tmp_path: Path, method: str, path: str, body: str | bytes | None, status: int, words: str
) -> None:
    controller: Any = Controller(tmp_path)

    async def ask() -> tuple[int, Any]:
        async with TestClient(TestServer(make_app(controller, lambda _: Person(0)))) as client:
            answer = await client.request(method, URL(path, encoded=True), data=body)
            return answer.status, await answer.json()

    answered, document = asyncio.run(ask())
    assert (answered, words in (document["error"] if status >= 400 else "")) == (status, True), document


def test_a_users_own_test_is_kept_as_that_and_leaves_room_for_those_of_operators(tmp_path: Path) -> None:
    controller: Any = Controller(tmp_path)
    controller.state.node_addresses = {"n1": "1.2.3.4"}

    def says(uid: int, number: int, kind: str = "test_passed") -> tuple[int, Any]:
        body = {"kind": kind, "id": f"t{number}", "what": "all is well"}
        ((status, document),) = asked(controller, Person(uid), ("POST", "/v1/nodes/n1/events", body))
        return status, document.get("kind")

    assert [says(STRANGE, 1), says(0, 1)] == [(200, "user_test_passed"), (200, "test_passed")]
    assert says(STRANGE, 2, "test_failed") == (200, "user_test_failed")
    for number in range(MAX_ADDED_A_DAY // 2):
        controller.ledger.record(
            NodeEvent(key=f"k{number}", node="n1", kind="user_test_passed", at=clock.wall(), what="all is well")
        )
    assert [says(STRANGE, 3)[0], says(0, 3)[0]] == [429, 200]
