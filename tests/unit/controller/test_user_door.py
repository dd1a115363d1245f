"""Users on other machines: proven by a credential each way, about their own jobs, and nothing of others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import pwd
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.base.failure import Failure
from slurm_watchdog.cli.munge_exchange import MungeExchanges
from slurm_watchdog.controller.api.asking import UserLookup
from slurm_watchdog.controller.api.doors import (
    ADDRESS_BURST,
    BURST,
    MAX_ANSWER,
    MAX_OF_ONE_ADDRESS,
    UserDoor,
)
from slurm_watchdog.controller.incidents.judge import OpenIncidents
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.identity.munge_library import BadCredential, Credential, MungeLibrary, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import SealedAnswer, request_digest
from slurm_watchdog.model.incidents import IncidentState
from slurm_watchdog.wire.port import DEADLINE_S, Port
from tests.builders.open_doors import MARK, Controller, incident

ANN = pwd.getpwnam("daemon").pw_uid
"""A user that every machine knows."""
BOB = 4321


@dataclass
class Vouching(MungeLibrary):
    """In the place of munged: a credential is what it holds, in base64, and is decoded once."""

    available: bool = True

    def __post_init__(self) -> None:
        self.seen: set[str] = set()

    def make(self, uid: int, payload: bytes, restricted_to: int | None = None, encrypted: bool = True) -> str:
        to = os.geteuid() if restricted_to is None else restricted_to
        held = [uid, to, encrypted, base64.b64encode(payload).decode(), os.urandom(8).hex()]
        return f"MUNGE:{base64.b64encode(json.dumps(held).encode()).decode()}:"

    async def decode(self, credential: str) -> Credential:
        if not self.available:
            raise MungeUnavailable("its socket is gone")
        if credential in self.seen:
            raise BadCredential("Replayed credential", replayed=True)
        self.seen.add(credential)
        try:
            uid, to, encrypted, payload, _ = json.loads(base64.b64decode(credential[6:-1]))
        except ValueError:
            raise BadCredential("Invalid credential") from None
        return Credential(uid, to, encrypted, base64.b64decode(payload))

    async def encode(self, payload: bytes, uid: int) -> str:
        return self.make(os.geteuid(), payload, uid)


@pytest.fixture
def controller(tmp_path: Path) -> Any:
    """Job 7 and incident abc123 are ANN's, job 8 and incident b0b are BOB's."""
    found: Any = Controller(tmp_path)
    bobs = replace(found.view, job=replace(found.view.job, job_id="8", uid=BOB, user="bob", nodes=("n8",)))
    found.view = replace(found.view, job=replace(found.view.job, uid=ANN, user="daemon"))
    own = [incident(owners=(ANN,)), incident(id="b0b", owners=(BOB,), job_ids=("8",), summary=f"{MARK} of bob")]
    own.append(incident(id="both", owners=(ANN, BOB), job_ids=("7", "8")))
    for each in own:
        found.journal.save_incident(each)
    found.judge.incidents = OpenIncidents(own)
    found.judge.view = replace(found.judge.view, jobs=(found.view, bobs), reporting_nodes=("n1", "n8"))
    found.state.jobs = {"7": found.view.job, "8": bobs.job}
    return found


@contextlib.asynccontextmanager
async def port_of(
    controller: Any, munge: Vouching, refused: Counter[str] | None = None
) -> AsyncIterator[tuple[Port, int]]:
    """The door on a free port."""
    counted: Counter[str] = Counter() if refused is None else refused
    server = UserDoor(controller, munge).server(lambda reason: counted.update((reason,)))
    port = await server.start("127.0.0.1", 0, 200)
    try:
        yield server, port
    finally:
        await server.cleanup()


def ask(
    controller: Any, method: str, target: str, body: Any = None, *, uid: int = ANN, signed: str | None = None,
    header: str | None = None, times: int = 1, munge: Vouching | None = None, **made: Any,
) -> tuple[int, Any]:  # fmt: skip
    """(status, document) of an opened answer, or of the refusal; of the last of `times`. `signed`: the target that the
    credential is for."""
    munge = munge or Vouching()
    data = b"" if body is None else json.dumps(body).encode()

    async def go() -> tuple[int, Any]:
        async with port_of(controller, munge) as (_, port), aiohttp.ClientSession() as client:
            digest = request_digest(method, signed or target, data).encode()
            headers = {"Authorization": header or f"Munge {munge.make(uid, digest, **made)}"}
            for _ in range(times):
                answer = await client.request(
                    method, f"http://127.0.0.1:{port}{target}", data=data or None, headers=headers
                )
            text = await answer.text()
            if answer.status != 200:
                return answer.status, json.loads(text)
            opened = await munge.decode(text)
            assert (opened.uid, opened.restricted_to) == (os.geteuid(), uid), "made by us, for the one who asked"
            sealed = msgspec.json.decode(opened.payload, type=SealedAnswer)
            assert sealed.digest == digest.decode()
            return sealed.status, json.loads(sealed.body)

    return asyncio.run(go())


def test_a_user_is_shown_his_own_jobs_and_incidents_and_nothing_of_others(controller: Any) -> None:
    status, told = ask(controller, "GET", "/v1/status")
    assert (status, [job["job_id"] for job in told["jobs"]]) == (200, ["7"])
    assert ([each["id"] for each in told["open"]], told["nodes"]["reporting"]) == (["abc123"], ["n1"])
    assert told["headline"] == "1 incident firing; 1 job of yours watched." and told["level"] == "critical"
    _, listed = ask(controller, "GET", "/v1/incidents")
    assert {each["id"] for each in listed} == {"abc123"}
    for answer in (told, listed):
        assert "bob" not in json.dumps(answer) and "n8" not in json.dumps(answer)
    assert ask(controller, "GET", "/v1/incidents/abc123")[0] == 200
    for other in ("b0b", "both", "nothing"):
        assert ask(controller, "GET", f"/v1/incidents/{other}")[0] == 404
        assert ask(controller, "GET", f"/v1/incidents/{other}/evidence/1")[0] in (403, 404)


def test_incidents_of_others_are_as_if_they_were_not_there_and_leave_room_for_ones_own(controller: Any) -> None:
    """Neither a beginning of their ids nor their number is said, and no crowd of them hides an older one of the user."""
    own = incident(id="b0a", owners=(ANN,), opened_at=1.0, summary='of bob: "owners":[4321]')
    controller.journal.save_incident(own)
    for number in range(250):
        controller.journal.save_incident(incident(id=f"b1{number:03}", owners=(BOB,), job_ids=("8",)))
    refusals = {
        given: ask(controller, "GET", f"/v1/incidents/{given}") for given in ("b1", "b1007", "bot", "both", "x")
    }
    assert {given: (404, told["error"].replace(given, "")) for given, (_, told) in refusals.items()} == {
        given: (404, refusals["x"][1]["error"].replace("x", "")) for given in refusals
    }
    assert ask(controller, "GET", "/v1/incidents/b0")[1]["incident"]["id"] == "b0a", "b0b is of another user"
    _, listed = ask(controller, "GET", "/v1/incidents")
    assert [each["id"] for each in listed] == ["abc123", "b0a"]
    assert ask(controller, "GET", "/v1/status")[1]["incidents"]["resolved"] == 0
    controller.journal.save_incident(replace(own, state=IncidentState.RESOLVED))
    assert ask(controller, "GET", "/v1/status")[1]["incidents"]["resolved"] == 1


def test_a_user_restarts_and_diagnoses_his_own_job_and_no_other(controller: Any) -> None:
    assert ask(controller, "POST", "/v1/restart", {"job_id": "7"})[0] == 200
    assert ask(controller, "POST", "/v1/diagnose", {"job_id": "7"})[0] == 200
    status, told = ask(controller, "POST", "/v1/restart", {"job_id": "7"}, uid=pwd.getpwnam("nobody").pw_uid)
    assert (status, told) == NOT_HIS
    assert ask(controller, "POST", "/v1/diagnose", {"job_id": "8"})[0] == 403


def test_a_user_follows_his_own_restart_and_no_action_of_others(controller: Any) -> None:
    for job, owner in (("b0b", "2"), ("both", "3")):
        decided = replace(controller.journal.decisions("abc123")[0], id=f"of-{owner}", incident_id=job)
        controller.journal.add_decision(decided)
    security = replace(controller.config.security, operators=("daemon",))
    controller.config = replace(controller.config, security=security)
    body = {"incident_ids": ["abc123", "b0b", "both", "nothing"]}
    status, told = ask(controller, "POST", "/v1/requests/progress", body)
    assert (status, list(told)) == (200, ["abc123"])


NOT_HIS = (403, {"error": "that is about no job of yours, or not for you to do"})


def test_who_may_restart_every_job_restarts_his_own_alone_through_this_door(controller: Any) -> None:
    security = replace(controller.config.security, may={"restart": ("daemon",)}, operators=("daemon",))
    controller.config = replace(controller.config, security=security)
    assert ask(controller, "POST", "/v1/restart", {"job_id": "7"})[0] == 200
    assert ask(controller, "POST", "/v1/restart/cancel", {"job_id": "7"})[0] == 409, "there is none to cancel"
    controller.view = replace(controller.view, job=controller.state.jobs["8"])
    for route in ("/v1/restart", "/v1/restart/cancel"):
        assert ask(controller, "POST", route, {"job_id": "8"}) == NOT_HIS


@pytest.mark.parametrize("exclude", [[], ["n1"], ["nowhere"]])
def test_a_job_of_another_user_and_one_that_is_not_there_are_refused_alike(controller: Any, exclude: list[str]) -> None:
    jobs = controller.state.jobs
    controller.state.node_addresses = {"n1": "10.0.0.1"}

    async def read_job(job_id: str) -> Any:
        return jobs.get(job_id)

    controller.slurm.read_job = read_job
    for route in ("/v1/restart", "/v1/restart/cancel"):
        for job_id in ("8", "999"):
            assert ask(controller, "POST", route, {"job_id": job_id, "exclude": exclude}) == NOT_HIS
    status, told = ask(controller, "POST", "/v1/restart", {"job_id": "7", "exclude": ["nowhere"]})
    assert (status, told["error"]) == (400, "Slurm knows no node nowhere")


@pytest.mark.parametrize("route", ["/v1/pause", "/v1/resume", "/v1/silences", "/v1/requests"])
def test_what_is_not_about_one_job_is_not_behind_this_door(controller: Any, route: str) -> None:
    assert ask(controller, "POST", route, {})[0] in (404, 405)


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ({"header": "Bearer x"}, 401, "prove themselves by MUNGE"),
        ({"header": "Munge MUNGE:AAAA:"}, 401, "Invalid credential"),
        ({"signed": "/v1/incidents"}, 401, "for another request"),
        ({"restricted_to": 12345}, 401, "is not for user"),
        ({"encrypted": False}, 401, "is not for user"),
        ({"times": 2}, 401, "Replayed credential"),
        ({"times": 210}, 429, "too many requests from this address"),
        ({"uid": 0}, 403, "on the management node"),
        ({"uid": BOB}, 403, "there is no user 4321 here"),
        ({"munge": Vouching(available=False)}, 503, "its socket is gone"),
    ],
)
def test_who_is_not_proven_is_told_nothing(controller: Any, how: dict[str, Any], status: int, words: str) -> None:
    answered, told = ask(controller, "GET", "/v1/status", **how)
    assert (answered, words in told["error"], set(told)) == (status, True, {"error"}), told


def test_the_people_of_a_login_node_have_a_pace_each(controller: Any) -> None:
    """Two who followed their restarts left nobody else of that machine an answer."""
    munge, other = Vouching(), pwd.getpwnam("nobody").pw_uid
    digest = request_digest("GET", "/v1/status", b"").encode()

    async def go() -> tuple[list[int], int]:
        async with port_of(controller, munge) as (_, port), aiohttp.ClientSession() as client:

            async def ask(uid: int) -> int:
                headers = {"Authorization": f"Munge {munge.make(uid, digest)}"}
                async with client.get(f"http://127.0.0.1:{port}/v1/status", headers=headers) as answer:
                    return answer.status

            said: list[int] = []  # on a busy machine she regains some while she asks
            while 429 not in said and len(said) < 10 * BURST:
                said.append(await ask(ANN))
            return said, await ask(other)

    said, others = asyncio.run(go())
    assert said[: int(BURST)] == [200] * int(BURST)
    assert (said[-1], others) == (429, 200)


def test_a_user_whom_the_directory_does_not_find_in_time_comes_again(controller: Any) -> None:
    answers, munge = threading.Event(), Vouching()
    digest = request_digest("GET", "/v1/status", b"").encode()

    def look_up(uid: int) -> Person:
        answers.wait(20.0)
        return Person(uid)

    async def go() -> tuple[int, str]:
        server = UserDoor(controller, munge, UserLookup(look_up, deadline_s=0.1)).server()
        port = await server.start("127.0.0.1", 0, 200)
        try:
            async with aiohttp.ClientSession() as client:
                headers = {"Authorization": f"Munge {munge.make(ANN, digest)}"}
                async with client.get(f"http://127.0.0.1:{port}/v1/status", headers=headers) as answer:
                    return answer.status, await answer.text()
        finally:
            answers.set()
            await server.cleanup()

    status, told = asyncio.run(go())
    assert (status, "retry" in told) == (503, True)


def test_an_answer_that_no_credential_holds_is_said_to_be_too_large(controller: Any) -> None:
    controller.judge.incidents = OpenIncidents([incident(owners=(ANN,), summary="x" * (MAX_ANSWER + 1))])
    status, told = ask(controller, "GET", "/v1/status")
    assert (status, "too large for this port" in told["error"]) == (413, True)


def test_an_answer_dense_in_quotes_is_measured_as_it_is_sealed(controller: Any) -> None:
    """Each quote has two bytes in the document, and four in what is sealed."""
    summary = '"' * (MAX_ANSWER // 3)
    controller.judge.incidents = OpenIncidents([incident(owners=(ANN,), summary=summary, facts=())])
    assert 2 * len(summary) < MAX_ANSWER < 4 * len(summary)
    status, told = ask(controller, "GET", "/v1/status")
    assert (status, "too large for this port" in told["error"]) == (413, True)


def test_connections_of_one_address_are_bounded_and_idle_ones_are_closed(controller: Any) -> None:
    """They took every descriptor of the controller."""

    async def go() -> None:
        refused: Counter[str] = Counter()
        async with port_of(controller, Vouching(), refused) as (server, port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_OF_ONE_ADDRESS + 1)]
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(idle[-1][0].read(1), 20) == b""
            assert refused == {"too_many_of_one_address": 1}
            for each in list(server.connections):
                each.check(each.since + DEADLINE_S + 1.0)
            for reader, writer in idle[:-1]:
                assert await asyncio.wait_for(reader.read(1), 20) == b""
                writer.close()
            idle[-1][1].close()
            assert server.limits.total == 0

    asyncio.run(go())


def test_the_pace_of_an_address_is_taken_before_the_body_of_its_request(controller: Any) -> None:
    """All requests come at once: on a busy machine an address may have regained one while it waits for an answer."""
    asks = int(ADDRESS_BURST) * 2
    restart = b"POST /v1/restart HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"

    async def go() -> None:
        async with port_of(controller, Vouching()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n" * asks + restart)
            heads = []
            while len(heads) <= asks:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                heads.append(head.split()[1])
            assert heads[: int(ADDRESS_BURST)] == [b"401"] * int(ADDRESS_BURST)
            assert heads[-1] == b"429"
            writer.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET /v1/status\nX-More:1 HTTP/1.1\r\nHost: x\r\n\r\n", 401),
        (b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: a\nb\r\n\r\n", 400),
        (b"CONNECT /v1/status HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /v1/restart HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n", 413),
    ],
)
def test_what_is_no_request_of_a_command_is_refused_at_the_port(controller: Any, said: bytes, status: int) -> None:
    async def go() -> bytes:
        async with port_of(controller, Vouching()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
            writer.close()
            return answer

    assert b" %d " % status in asyncio.run(go())


@pytest.mark.parametrize(
    "address", ["munge://", "munge://host", "munge://host:0", "munge://host:99999", "munge://a b:1", "munge://h:1/x"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(Failure, match="is not a controller's address"):
        MungeExchanges(address, 1.0)
