"""The page's door: who comes in, what is given out, and that it changes nothing. What a browser makes of it:
tests/integration/test_page.py."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.lateness import is_late
from slurm_watchdog.controller.health.views import node_map, ranks_of
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.model.cluster_view import RankGpu
from slurm_watchdog.model.node_view import GpuView
from slurm_watchdog.model.observations import Gpu
from tests.builders import views
from tests.page_server import SEES_ALL, FixedController, large_cluster, serving

Talk = Callable[[aiohttp.ClientSession, str], Awaitable[Any]]
TOKEN = "correct-horse-battery"


def basic(user: str, password: str) -> str:
    """As a browser sends it."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def talk_to(page: Talk, *, token: str = "", nodes: int = 6) -> Any:
    async def run() -> Any:
        async with (
            serving(FixedController(*large_cluster(nodes)), token) as url,
            aiohttp.ClientSession() as session,
        ):
            return await page(session, url)

    return asyncio.run(run())


def test_the_map_has_a_letter_for_every_gpu_and_a_word_for_every_node() -> None:
    view, incidents = large_cluster(6, gpus=2)
    document = node_map(view, incidents)
    rows = {row.node: row for row in document}
    assert [(row.node, row.state, row.gpus) for row in document] == [
        ("node0000", "ok", "bb"),
        ("node0001", "named", "xb"),
        ("node0002", "ok", "bt"),
        ("node0003", "ok", "ff"),
        ("node0004", "away", "ff"),
        ("node0005", "silent", "uu"),
    ]
    assert rows["node0004"].reason == "kernel panic"
    assert (rows["node0002"].jobs, rows["node0003"].jobs) == (("7",), ())


@pytest.mark.parametrize(
    ("gpu", "letter"),
    [
        ({"utilization_ratio": None, "error": "NVML_ERROR_GPU_IS_LOST"}, "e"),
        ({"utilization_ratio": 0.0, "pids": (1,)}, "i"),
        ({"utilization_ratio": 0.0, "pids": ()}, "f"),
        ({"utilization_ratio": 0.0, "pids": None}, "f"),
        ({"utilization_ratio": 0.9, "pids": None, "throttle": ("sw_power_cap",)}, "b"),
        ({"utilization_ratio": 0.9, "throttle": ("sw_thermal_slowdown",)}, "t"),
    ],
)
def test_a_gpu_is_shown_as_what_matters_now(gpu: dict[str, Any], letter: str) -> None:
    view, _ = large_cluster(3, gpus=1)
    node = view.nodes[0]
    shown = GpuView(node=node.name, gpu=Gpu(uuid="G", index=0, **gpu))
    one = views.cluster(
        nodes=(type(node)(name=node.name, reported_at=1.0, gpus=(shown,)),), reporting_nodes=(node.name,)
    )
    assert node_map(one, [])[0].gpus == letter


def test_a_job_is_shown_rank_by_rank_with_what_each_waits_for() -> None:
    gpu = GpuView(node="n1", gpu=Gpu(uuid="G0", index=0, utilization_ratio=0.0, sm_clock_hz=1.155e9))
    view = views.job(
        processes=(views.seen(0, blocked=views.blocked(65.0)), views.seen(1, gone_s=40.0)),
        gpus=(RankGpu(rank=0, pid=100, view=gpu),),
    )
    first, second = ranks_of(view, {1})
    assert (first.letter, first.gpus[0].uuid, first.view.process.blocked) == ("e", "G0", views.blocked(65.0))
    assert (second.letter, second.view.alive, second.gpus) == ("x", False, ())


def test_a_rank_that_the_others_wait_for_is_late_by_the_time_that_they_wait() -> None:
    view, _ = large_cluster(8, ranks_each=8)
    (job,) = view.jobs
    ranks = ranks_of(job, ())
    assert [each.view.process.rank for each in ranks if each.letter == "L"] == [5]
    assert (ranks[5].late_ratio, ranks[4].late_ratio) == (pytest.approx(0.5, abs=0.01), 0.0)
    unknown = ranks_of(replace(job, waits=()), ())
    assert {(each.letter == "L", each.late_ratio) for each in unknown} == {(False, None)}
    progress = views.progress(
        900.0, step=99, first_step=0, paces_s=(10.0,) * 60, read_age_s=1.0, last_increase_age_s=900.0
    )
    stuck = replace(job, progress=progress)
    assert is_late(stuck) and not any(each.letter == "L" for each in ranks_of(stuck, ()))


def test_without_a_token_the_page_is_open_and_gives_out_no_evidence() -> None:
    async def page(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url) as answer:
            text = await answer.text()
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http:" not in text and "https:" not in text
        async with session.get(f"{url}/?incident=abc123") as answer:
            text = await answer.text()
            assert "A GPU has a fault on node0001 (job 7)." in text and "Details are for the owner" in text
            assert "said by m4" not in text and "all_reduce" not in text
        async with session.get(f"{url}/v1/incidents/abc123") as answer:
            assert (await answer.json())["evidence"] == []
        async with session.get(f"{url}/v1/incidents/abc123/evidence/1") as answer:
            assert answer.status == 403
            assert "is for the owner of its jobs" in (await answer.json())["error"]

    talk_to(page)


@pytest.mark.parametrize(
    "auth",
    [None, basic("me", "wrong"), basic(TOKEN, ""), "Basic !!!", "Bearer x", "Basic"],
)
def test_with_a_token_nobody_comes_in_without_it(auth: str | None) -> None:
    async def page(session: aiohttp.ClientSession, url: str) -> None:
        headers = {"Authorization": auth} if auth else {}
        for path in ("/", "/page.js", "/v1/overview", "/v1/incidents/abc123/evidence/1"):
            async with session.get(url + path, headers=headers) as answer:
                assert (answer.status, "Basic" in answer.headers["WWW-Authenticate"]) == (401, True)

    talk_to(page, token=TOKEN)


def test_after_twenty_wrong_passwords_nothing_is_looked_at_for_a_while() -> None:
    async def page(session: aiohttp.ClientSession, url: str) -> None:
        async def status(auth: str | None) -> int:
            async with session.get(f"{url}/", headers={"Authorization": auth} if auth else {}) as answer:
                return answer.status

        assert {await status(None) for _ in range(30)} == {401}, "a browser that asks first is no guess"
        assert {await status(basic("me", f"guess {number}")) for number in range(20)} == {401}
        assert [await status(basic("me", TOKEN)), await status(basic("me", "guess"))] == [429, 429]

    talk_to(page, token=TOKEN)


def test_with_its_token_evidence_is_given_out() -> None:
    async def page(session: aiohttp.ClientSession, url: str) -> None:
        headers = {"Authorization": basic("anybody", TOKEN)}
        async with session.get(f"{url}/v1/incidents/abc123/evidence/1", headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, {"secret": "of a user"})
        async with session.get(f"{url}/v1/incidents/abc123/evidence/9", headers=headers) as answer:
            assert answer.status == 404

    talk_to(page, token=TOKEN)


def test_another_site_that_calls_itself_by_our_address_reads_nothing() -> None:
    async def page(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(f"{url}/v1/overview", headers={"Host": "evil.example:9767"}) as answer:
            assert (answer.status, await answer.json()) == (421, {"error": "ask for localhost"})
        async with session.get(f"{url}/v1/overview", headers={"Host": "localhost:9767"}) as answer:
            assert answer.status == 200

    talk_to(page)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed_through_the_page(method: str) -> None:
    async def page(session: aiohttp.ClientSession, url: str) -> None:
        for path in ("/", "/v1/overview", "/v1/incidents/abc123", "/v1/pause", "/v1/restart"):
            async with session.request(method, url + path) as answer:
                assert answer.status in (404, 405), path

    talk_to(page)


def test_what_is_not_there_is_said_in_a_sentence() -> None:
    async def page(session: aiohttp.ClientSession, url: str) -> list[tuple[int, str]]:
        found = []
        for path in ("/v1/jobs/99", "/v1/incidents/zzz", "/nowhere"):
            async with session.get(url + path) as answer:
                found.append((answer.status, (await answer.json())["error"]))
        return found

    answers = talk_to(page)
    assert [status for status, _ in answers] == [404, 404, 404]
    assert "not running" in answers[0][1]
    assert "there is no incident" in answers[1][1]


def test_ten_thousand_nodes_are_a_map_of_less_than_a_megabyte() -> None:
    view, incidents = large_cluster(10_000)
    assert len(msgspec.json.encode(node_map(view, incidents))) < 1 << 20


def test_a_job_that_has_ended_is_shown_to_operators_and_to_its_owner_alone() -> None:
    async def runs(person: Person) -> tuple[int, int]:
        controller = FixedController(*large_cluster(6))
        async with (
            serving(controller, person=person) as url,
            aiohttp.ClientSession() as session,
            session.get(f"{url}/v1/jobs/5") as answer,
        ):
            document = await answer.json()
            return answer.status, len(document.get("history", {"runs": ()})["runs"])

    for person, found in (
        (SEES_ALL, (200, 1)),
        (Person(1000), (200, 1)),
        (Person(1001), (404, 0)),
        (Person(), (404, 0)),
    ):
        assert asyncio.run(runs(person)) == found
