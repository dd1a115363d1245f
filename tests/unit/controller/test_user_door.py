"""Users on other machines: proven by a credential each way, about their own jobs, and nothing of others."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from slurm_watchdog.cli.munge_exchange import ExchangeFailed, MungeExchange
from slurm_watchdog.controller.api.user_door import MAX_ANSWER, UserDoor, make_user_app
from slurm_watchdog.controller.incidents.open_limit import OpenIncidents
from slurm_watchdog.identity.munge_decoder import BadCredential, Credential, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import SealedAnswer, request_digest
from tests.builders.open_doors import MARK, Controller, incident

ANN = pwd.getpwnam("daemon").pw_uid
"""A user that every machine knows."""
BOB = 4321


@dataclass
class Vouching:
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
        return Credential(uid, 1, to, encrypted, base64.b64decode(payload))

    async def close(self) -> None:
        pass

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


def ask(
    controller: Any, method: str, target: str, body: Any = None, *, uid: int = ANN, signed: str | None = None,
    header: str | None = None, times: int = 1, munge: Vouching | None = None, **made: Any,
) -> tuple[int, Any]:  # fmt: skip
    """(status, document) of an opened answer, or of the refusal; of the last of `times`. `signed`: the target that the
    credential is for."""
    munge = munge or Vouching()
    data = b"" if body is None else json.dumps(body).encode()

    async def go() -> tuple[int, Any]:
        async with TestClient(TestServer(make_user_app(controller, UserDoor(munge, munge.encode)))) as client:
            digest = request_digest(method, signed or target, data).encode()
            headers = {"Authorization": header or f"Munge {munge.make(uid, digest, **made)}"}
            for _ in range(times):
                answer = await client.request(method, target, data=data or None, headers=headers)
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


def test_a_user_restarts_and_diagnoses_his_own_job_and_no_other(controller: Any) -> None:
    assert ask(controller, "POST", "/v1/restart", {"job_id": "7"})[0] == 200
    assert ask(controller, "POST", "/v1/diagnose", {"job_id": "7"})[0] == 200
    status, told = ask(controller, "POST", "/v1/restart", {"job_id": "7"}, uid=pwd.getpwnam("nobody").pw_uid)
    assert (status, told) == (403, {"error": "that is about no job of yours, or not for you to do"})
    assert ask(controller, "POST", "/v1/diagnose", {"job_id": "8"})[0] == 403


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
        ({"times": 40}, 429, "too many requests"),
        ({"uid": 0}, 403, "on the management node"),
        ({"uid": BOB}, 403, "there is no user 4321 here"),
        ({"munge": Vouching(available=False)}, 503, "its socket is gone"),
    ],
)
def test_who_is_not_proven_is_told_nothing(controller: Any, how: dict[str, Any], status: int, words: str) -> None:
    answered, told = ask(controller, "GET", "/v1/status", **how)
    assert (answered, words in told["error"], set(told)) == (status, True, {"error"}), told


def test_an_answer_that_no_credential_holds_is_said_to_be_too_large(controller: Any) -> None:
    controller.judge.incidents = OpenIncidents([incident(owners=(ANN,), summary="x" * (MAX_ANSWER + 1))])
    status, told = ask(controller, "GET", "/v1/status")
    assert (status, "too large for this door" in told["error"]) == (413, True)


@pytest.mark.parametrize(
    "address", ["munge://", "munge://host", "munge://host:0", "munge://host:99999", "munge://a b:1", "munge://h:1/x"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ExchangeFailed, match="is no address of a controller"):
        MungeExchange(address, 1.0)
