"""Who may use a command: root, the controller's user, the owner, those whom the site names, and what Slurm knows of them."""

from __future__ import annotations

import asyncio
import pwd
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.controller.api.local_socket import make_app
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.model.slurm import SlurmPerson
from slurm_watchdog.slurm.fields import ParseError
from slurm_watchdog.slurm.people import parse_people
from tests.builders.open_doors import OWNER, STRANGE, Controller

DAEMON = pwd.getpwnam("daemon").pw_uid
ASKED = {
    "pause": ("/v1/pause", {}),
    "restart": ("/v1/restart", {"job_id": "7"}),
    "silence": ("/v1/silences", {"nodes": ["n1"], "for_s": 60.0}),
    "acknowledge": ("/v1/incidents/abc123/acknowledge", {}),
    "drain": ("/v1/nodes/n1/drain", {"reason": "fan"}),
    "force_drain": ("/v1/nodes/n1/drain", {"reason": "fan", "force": True}),
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
            (Person(OWNER), [], command in ("restart", "acknowledge")),
        ]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        assert status(place, person, command, names) == (200 if may else 403), (person, names)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/nodes/n1/drain", {"reason": "fan"}, 200),
        ("/v1/nodes/n1/undrain", {}, 200),
        ("/v1/nodes/n1/drain", {"reason": "fan", "force": True}, 403),
        ("/v1/nodes/n1/drain", {"reason": " "}, 400),
        ("/v1/nodes/n7/drain", {"reason": "fan"}, 404),
        ("/v1/nodes/n7/undrain", {}, 404),
        ("/v1/nodes/n1;reboot/drain", {"reason": "fan"}, 400),
    ],
)
def test_who_may_drain_may_give_back_and_stays_within_the_budget(
    tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    controller: Any = Controller(tmp_path)
    controller.config = parse_config(f"security: {{may: {{drain: ['{STRANGE}']}}}}\n")
    controller.state.node_addresses = {"n1": "1.2.3.4"}

    async def ask() -> int:
        async with TestClient(TestServer(make_app(controller, lambda _: Person(STRANGE)))) as client:
            return (await client.post(path, json=body)).status

    assert asyncio.run(ask()) == status


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
        ("{restart: ['slurm:admin']}", "none of slurm:operator, slurm:coordinator"),
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
