"""Many jobs at once: which are meant, which cannot be asked and why, and what is refused."""

from __future__ import annotations

import asyncio
import pwd
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.incidents.judge import OpenIncidents
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.model.actions import Action, Decision, Verdict
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.slurm import SlurmPerson
from tests.builders.open_doors import OWNER, STRANGE, Controller, incident


def ask(controller: Any, method: str, path: str, body: Any = None, *, person: int = 0) -> tuple[int, Any]:
    async def go() -> tuple[int, Any]:
        async with TestClient(TestServer(make_app(controller, lambda _: Person(person)))) as client:
            answer = await client.request(method, path, json=body)
            return answer.status, await answer.json()

    return asyncio.run(go())


@pytest.fixture
def controller(tmp_path: Path) -> Any:
    """With job 7 of OWNER on n1 and n2, in partition gpu."""
    found: Any = Controller(tmp_path)
    found.state.jobs = {
        "7": replace(found.view.job, partition="gpu", account="vision", user="ann", nodes=("n1", "n2")),
        "8": replace(found.view.job, job_id="8", state="PENDING", nodes=("n1",)),
    }
    return found


def test_the_jobs_that_run_are_listed(controller: Any) -> None:
    status, told = ask(controller, "GET", "/v1/requests/jobs")
    assert (status, [each["job_id"] for each in told]) == (200, ["7"])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_gets_nowhere_near_the_journal(controller: Any, number: str) -> None:
    async def go() -> int:
        async with TestClient(TestServer(make_app(controller, lambda _: Person(0)))) as client:
            body = f'{{"wish": "save", "job_ids": ["7"], "before": {number}}}'
            return (await client.post("/v1/requests", data=body)).status

    assert asyncio.run(go()) == 400


def why_not(controller: Any) -> str:
    return str(ask(controller, "GET", "/v1/requests/jobs")[1][0]["why_not"])


def test_a_job_that_cannot_see_its_kill_switch_says_why(controller: Any) -> None:
    view = controller.view
    assert why_not(controller) == ""
    controller.view = replace(view, silent_nodes=("n2",))
    assert "no agent answers on n2" in why_not(controller)
    controller.view = replace(view, processes=())
    assert "no process of a training" in why_not(controller)
    controller.view = None
    assert "no agent answers on its nodes" in why_not(controller)
    controller.view = view
    hang = incident(kind=IncidentKind.COLLECTIVE_HANG, actionable=True, jobs_now=("7",))
    controller.judge.incidents = OpenIncidents([hang])
    assert why_not(controller) == "it hangs (collective_hang, incident abc123): its loop cannot see a kill switch"
    controller.decider.why_left_alone = lambda job: "its owner wants it left alone"
    assert why_not(controller) == "its owner wants it left alone"


def test_what_is_asked_of_many_is_answered_for_each(controller: Any) -> None:
    status, told = ask(controller, "POST", "/v1/requests", {"wish": "save", "job_ids": ["7", "9"]})
    assert (status, [each["verdict"] for each in told]) == (200, ["allowed", "refused"])
    assert told[0]["incident_id"] == "abc123"
    assert "does not list it" in told[1]["reason"]
    for person, verdict in ((OWNER, "allowed"), (STRANGE, "refused")):
        _, told = ask(controller, "POST", "/v1/requests", {"wish": "hold", "job_ids": ["7"]}, person=person)
        assert told[0]["verdict"] == verdict


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"wish": "save"}, "missing required field `job_ids`"),
        ({"wish": "save", "job_ids": []}, "length >= 1 - at `$.job_ids`"),
        ({"wish": "save", "job_ids": ["x"]}, "is not a job id"),
        ({"wish": "kill", "job_ids": ["7"]}, "Invalid enum value 'kill' - at `$.wish`"),
        ({"wish": "save", "job_ids": ["7"], "before": 5.0}, "that time is over"),
        ({"wish": "save", "job_ids": ["7"], "before": 1e300}, "within the next 30 days"),
        ({"wish": "save", "job_ids": ["7"], "exclude": ["n99"]}, "Slurm knows no node n99"),
        ({"wish": "save", "job_ids": ["7"], "before": "noon"}, "Expected `float | null`, got `str` - at `$.before`"),
        ({"wish": "restart", "job_ids": ["7"], "exclude": "n1"}, "Expected `array`, got `str` - at `$.exclude`"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(controller: Any, body: Any, words: str) -> None:
    status, told = ask(controller, "POST", "/v1/requests", body)
    assert (status, words in told["error"]) == (400, True), told


def test_how_far_it_is_is_for_those_who_may_see_it(controller: Any) -> None:
    for person, seen in ((0, ["abc123"]), (OWNER, ["abc123"]), (STRANGE, [])):
        _, told = ask(controller, "POST", "/v1/requests/progress", {"incident_ids": ["abc123", "no"]}, person=person)
        assert list(told) == seen


COORDINATOR = pwd.getpwnam("daemon").pw_uid
MAY = "security: {may: {restart: ['slurm:coordinator', '%d']}}\n"


def asked_for_a_restart(controller: Any, by: str, kind: IncidentKind = IncidentKind.OPERATOR_RESTART) -> str:
    """The id of an incident of job 7 with an action under way; `by` asked for it."""
    controller.journal.save_incident(incident(id="r1", kind=kind))
    controller.journal.add_decision(
        Decision(id="dr1", incident_id="r1", action=Action.GRACEFUL_RESTART, verdict=Verdict.ALLOWED, by="rule",
                 reason="asked for", decided_at=1.0, asked_by=by)
    )  # fmt: skip
    return "r1"


@pytest.mark.parametrize(
    ("person", "by", "kind", "follows"),
    [
        (STRANGE, f"uid {STRANGE}", IncidentKind.OPERATOR_RESTART, True),
        (STRANGE, "ann", IncidentKind.OPERATOR_RESTART, True),
        (COORDINATOR, "ann", IncidentKind.OPERATOR_RESTART, True),
        (STRANGE + 1, "ann", IncidentKind.OPERATOR_RESTART, False),
        (STRANGE + 1, f"uid {STRANGE + 1}", IncidentKind.OPERATOR_RESTART, True),
        (STRANGE, "ann", IncidentKind.LOG_ERROR, False),
        (COORDINATOR, "daemon", IncidentKind.LOG_ERROR, False),
    ],
)
def test_a_request_is_followed_by_who_made_it_and_who_may_make_it(
    controller: Any, person: int, by: str, kind: IncidentKind, follows: bool
) -> None:
    """Of what was found by itself a colleague sees no more than before; of the request no evidence either."""
    controller.config = parse_config(MAY % STRANGE)
    controller.state.people = (SlurmPerson(user="daemon", coordinates=("vision",)),)
    asked = asked_for_a_restart(controller, by, kind)
    _, told = ask(controller, "POST", "/v1/requests/progress", {"incident_ids": [asked]}, person=person)
    assert list(told) == [asked] * follows
    _, told = ask(controller, "GET", f"/v1/incidents/{asked}", person=person)
    assert [each["decision_id"] for each in told["actions"]] == ["dr1"] * follows
    assert (told["evidence"], told["timeline"], told["incident"]["details_for"] != "") == ([], [], True)
