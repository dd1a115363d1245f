"""Silences: what they cover, what they quiet, how they end, and that a crash forgets none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, IncidentState, Silence
from slurm_watchdog.notify.dispatcher import IncidentSources
from slurm_watchdog.notify.notification import Notice, message_of
from slurm_watchdog.notify.programs import Programs, event_json
from tests.builders.asking import asked
from tests.builders.notices import FAILED, INCIDENT, OVER, SITE, Ticking, incident, replace
from tests.builders.open_doors import OPERATOR, OWNER, STRANGE, Controller
from tests.builders.silences import Given

HOUR = Silence(id="s1", by="ann", at=1000.0, until=4600.0, jobs=("7",))
TWO_NODES = replace(INCIDENT, culprits=(Culprit(node="n1"), Culprit(node="n2")))


def named(**selectors: tuple[str, ...]) -> Silence:
    return replace(HOUR, jobs=selectors.pop("jobs", ()), **selectors)


@pytest.mark.parametrize(
    ("silence", "of", "covered"),
    [
        (named(jobs=("7",)), INCIDENT, True),
        (named(jobs=("8",)), INCIDENT, False),
        (named(jobs=("7",)), replace(INCIDENT, job_ids=("7", "8")), False),
        (named(jobs=("7", "8")), replace(INCIDENT, job_ids=("7", "8")), True),
        (named(jobs=("7",)), replace(INCIDENT, job_ids=("7_3",)), True),
        (named(jobs=("7_3",)), replace(INCIDENT, job_ids=("7_4",)), False),
        (named(jobs=("7",)), replace(INCIDENT, job_ids=()), False),
        (named(nodes=("n1",)), INCIDENT, True),
        (named(nodes=("n1",)), TWO_NODES, False),
        (named(nodes=("n1", "n2")), TWO_NODES, True),
        (named(nodes=("n1",)), replace(INCIDENT, exclude_nodes=("n9",)), False),
        (named(nodes=("n1",)), replace(INCIDENT, culprits=()), False),
        (named(nodes=("n4",)), replace(INCIDENT, culprits=(), subject="node:n4"), True),
        (named(kinds=("collective_hang",)), INCIDENT, True),
        (named(kinds=("gpu_fault",)), INCIDENT, False),
        (named(kinds=("collective_hang",), jobs=("8",)), INCIDENT, False),
        (replace(HOUR, owner=5), replace(INCIDENT, owners=(5,)), True),
        (replace(HOUR, owner=5), replace(INCIDENT, owners=(5, 6)), False),
        (replace(HOUR, owner=5), replace(INCIDENT, owners=(5,), subject="node:n1"), False),
        (replace(HOUR, owner=5), replace(INCIDENT, owners=(5,), subject="run:7.0"), True),
        (replace(HOUR, owner=5), replace(INCIDENT, owners=(5,), subject="loop:7"), True),
        (replace(HOUR, owner=5), replace(INCIDENT, owners=(5,), subject="chain:7"), True),
        (replace(HOUR, owner=5), replace(INCIDENT, owners=(5,), subject="gpu:n1/0"), False),
    ],
)
def test_a_silence_covers_an_incident_that_is_about_nothing_else(silence: Silence, of: Any, covered: bool) -> None:
    assert silence.covers(of) is covered


def test_a_silence_outlasts_a_crash_and_what_still_fires_at_its_end_is_announced_once() -> None:
    given = Given([INCIDENT, incident(8)])
    given.silences().add(replace(HOUR, reason="firmware"))
    assert given.news.said == [("i1", "silenced by ann until 1970-01-01 01:16 UTC (silence s1): firmware")]
    again = given.silences()  # killed, and started again
    assert again.silence_of(INCIDENT) is not None and again.silence_of(incident(8)) is None
    given.now = 4599.0
    again.expire()
    assert again.listed() and len(given.news.said) == 1
    given.now = 4600.0
    again.expire()
    for _ in range(2):
        assert given.silences().listed() == ()
    assert given.news.said[1:] == [("i1", "opened")]
    assert [text for _, text in given.journal.timeline("i1")][-1] == "silence s1 is over: its time is over"


@pytest.mark.parametrize(
    ("now", "over"), [(-2601.0, True), (-2600.0, False), (999.0, False), (4599.0, False), (4600.0, True)]
)
def test_a_silence_of_a_clock_that_was_ahead_is_over_when_it_is_set_right(now: float, over: bool) -> None:
    """One hour from 1000 on: a clock that is set back by a little leaves it, one that was a year ahead hides no year."""
    given = Given([INCIDENT])
    silences = given.silences()
    silences.add(HOUR)
    given.now = now
    silences.expire()
    assert (silences.listed() == (), given.news.said[1:] == [("i1", "opened")]) == (over, over)


def test_a_journal_that_fails_at_the_end_leaves_the_silence_until_the_next_tick(tmp_path: Path) -> None:
    given = Given([INCIDENT], journal=Journal(f"sqlite:///{tmp_path}/journal.sqlite"))
    silences = given.silences()
    silences.add(HOUR)
    given.now = 5000.0
    with given.journal._database.engine.begin() as sql:
        sql.exec_driver_sql("ALTER TABLE silences RENAME TO gone")
    silences.expire()
    assert silences.listed() == (HOUR,)
    with given.journal._database.engine.begin() as sql:
        sql.exec_driver_sql("ALTER TABLE gone RENAME TO silences")
    silences.expire()
    assert silences.listed() == ()


def topics_of(silence: Silence | None) -> list[Notice]:
    async def post(_: object) -> None: ...

    journal = Journal("sqlite://")
    notifier = Ticking(journal, [Programs("people", post)]).notifier
    notifier.attach(IncidentSources(silence_of=lambda _: silence))
    notifier.opened(INCIDENT)
    notifier.ended(INCIDENT, FAILED)
    notifier.noted(INCIDENT, "silenced by ann")
    notifier.resolved(OVER)
    return [msgspec.convert(item.payload, Notice) for item in journal.outbox.pending(10)]


def test_a_silenced_incident_is_not_spoken_of_and_the_end_of_one_that_was_announced_is() -> None:
    """INCIDENT fired at 160."""
    assert [each.topic for each in topics_of(None)] == ["opened", "ended", "noted", "resolved"]
    assert [each.topic for each in topics_of(replace(HOUR, at=150.0))] == ["noted"]
    assert [each.topic for each in topics_of(replace(HOUR, at=170.0))] == ["noted", "resolved"]


def test_what_is_said_of_a_silence_is_said_to_programs_too() -> None:
    noted, _ = topics_of(HOUR)
    assert message_of(noted).sentence == "silenced by ann"
    assert list(event_json(noted, SITE)["said"]) == ["silenced by ann"]


def test_prometheus_sees_a_silenced_incident_apart_from_those_that_fire() -> None:
    metrics = ControllerMetrics()
    pending = incident(9, state=IncidentState.PENDING)
    metrics.show(
        ClusterView(now=0.0), {}, [INCIDENT, incident(8), pending], {}, is_silenced=lambda each: each.id != "i8"
    )
    text = metrics.text().decode()
    for state in ("firing", "silenced", "pending"):
        assert f'slurm_watchdog_incidents{{kind="collective_hang",state="{state}"}} 1.0' in text


NODE = {"nodes": ["n1"], "for_s": 60.0, "reason": "a cable"}


def test_an_operator_silences_lists_and_ends(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    (_, made), (_, told), (_, seen) = asked(
        controller, Person(OPERATOR), ("POST", "/v1/silences", NODE), ("GET", "/v1/silences", None),
        ("GET", "/v1/status", None),
    )  # fmt: skip
    (one,) = told["silences"]
    assert (one["id"], one["nodes"], one["reason"]) == (made["id"], ["n1"], "a cable")
    assert seen["silences"] == told["silences"]
    assert [each["quiet"].partition(" until ")[0] for each in seen["open"]] == [f"silenced by uid {OPERATOR}"]
    (status, left), (again, _) = asked(
        controller,
        Person(0),
        ("POST", f"/v1/silences/{made['id']}/end", {}),
        ("POST", f"/v1/silences/{made['id']}/end", {}),
    )
    assert (status, left["silences"], again) == (200, [], 404)


@pytest.mark.parametrize(
    ("person", "path", "body", "status", "words"),
    [
        (0, "/v1/silences", {"for_s": 60.0}, 400, "name what is silenced"),
        (0, "/v1/silences", {"nodes": ["n1"]}, 400, "missing required field `for_s`"),
        (0, "/v1/silences", NODE | {"for_s": 1e9}, 400, "Expected `float` <= 2592000.0"),
        (0, "/v1/silences", NODE | {"for_s": True}, 400, "Expected `float`, got `bool`"),
        (0, "/v1/silences", {"kinds": ["gpu_falt"], "for_s": 1.0}, 400, "'gpu_falt' is not a kind of incident; known:"),
        (0, "/v1/silences", {"jobs": ["x; rm"], "for_s": 1.0}, 400, "is not a job id"),
        (0, "/v1/silences", {"kinds": "gpu_fault", "for_s": 1.0}, 400, "Expected `array`, got `str` - at `$.kinds`"),
        (STRANGE, "/v1/silences", NODE, 403, "may silence this"),
        (OWNER, "/v1/silences", NODE, 403, "may silence this"),
        (OWNER, "/v1/silences", {"jobs": ["7"], "for_s": 1.0}, 200, ""),
        (OWNER, "/v1/silences", {"jobs": ["7", "8"], "for_s": 1.0}, 403, "may silence this"),
        (STRANGE, "/v1/silences", {"jobs": ["7"], "for_s": 1.0}, 403, "may silence this"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_who_may_not_is_said(
    tmp_path: Path, person: int, path: str, body: Any, status: int, words: str
) -> None:
    ((answered, document),) = asked(Controller(tmp_path), Person(person), ("POST", path, body))
    assert (answered, words in document.get("error", "")) == (status, True), document


def test_the_silences_of_one_owner_leave_room_for_others(tmp_path: Path) -> None:
    controller: Any = Controller(tmp_path)

    def add(person: int) -> int:
        async def go() -> int:
            async with TestClient(TestServer(make_app(controller, lambda _: Person(person)))) as client:
                answer = await client.post("/v1/silences", json={"jobs": ["7"], "for_s": 60})
                return answer.status

        return asyncio.run(go())

    assert [add(OWNER) for _ in range(11)] == [200] * 10 + [429]
    assert add(0) == 200
    assert {each.owner for each in controller.silences.listed()} == {OWNER, None}


@pytest.mark.parametrize(
    ("others", "asked_for", "status"),
    [(OWNER, "7", 200), (STRANGE, "7", 403), (STRANGE, "7_1", 200), (OWNER, "7_9", 403), (OWNER, "70", 403)],
)
def test_an_owner_silences_his_array_by_its_id(tmp_path: Path, others: int, asked_for: str, status: int) -> None:
    controller: Any = Controller(tmp_path)
    of_7 = controller.state.jobs.pop("7")
    ids = {"7_1": OWNER, "7_[2-8]": others}
    controller.state.jobs = {each: replace(of_7, job_id=each, uid=uid) for each, uid in ids.items()}
    body = {"jobs": [asked_for], "for_s": 60.0}
    assert asked(controller, Person(OWNER), ("POST", "/v1/silences", body))[0][0] == status
