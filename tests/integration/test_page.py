"""The page in a real Chromium: over a real cluster with a hang in it, over a thousand nodes, and with names
that are meant to harm.

Screenshots stay in `build/screenshots` (not in git), to be looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from slurm_watchdog.controller.incidents.judge import OpenIncidents
from tests.builders.notices import replace
from tests.integration import packages
from tests.integration.chromium import Browser
from tests.integration.monitoring import free_port
from tests.page_server import SEES_ALL, FixedController, large_cluster, serving
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog, train_script

SHOTS = Path(__file__).resolve().parents[2] / "build/screenshots"
PHONE = (375, 812)
HOSTILE = (
    '<img src=x onerror="document.title=1"><script>document.title=1</script>{{7*7}}\u202e\x1b[31m javascript:alert(1)'
)


@pytest.fixture(scope="module", autouse=True)
def chromium() -> None:
    packages.ensure("Chromium")


def look_at(controller: FixedController, look: Callable[[Browser], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with serving(controller, person=SEES_ALL) as url, Browser(url) as browser:
            answer = await look(browser)
            assert browser.errors == []
            return answer

    return asyncio.run(run())


def test_a_thousand_nodes_are_drawn_each_with_its_gpus_and_can_be_walked_to_by_keyboard() -> None:
    async def look(browser: Browser) -> None:
        await browser.sees("Nodes and their GPUs (1000)")
        count = "document.querySelectorAll('.map .node').length + ' ' + document.querySelectorAll('.map .gpu').length"
        assert await browser.evaluate(count) == "1000 8000"
        await browser.screenshot(SHOTS / "thousand-nodes.png")
        # Skip link, title, three views, the filter, then the first incident.
        for _ in range(7):
            await browser.press("Tab")
        assert await browser.evaluate("document.activeElement.textContent") == "gpu_fault"
        await browser.press("Enter")
        await browser.sees("GPU-node0001-0")
        assert await browser.evaluate("document.querySelector('main').getAttribute('tabindex')") == "-1"
        await browser.goes("?")
        await browser.sees("Nodes and their GPUs (1000)")
        named = await browser.evaluate("document.querySelector('.node.named').getAttribute('aria-label')")
        assert named == "node0001; named by an incident; 1 GPU named by an incident, 7 GPU works; job 7"

    look_at(FixedController(*large_cluster(1000)), look)


@pytest.mark.thorough
def test_a_job_of_1024_ranks_has_a_cell_for_each_its_runs_and_charts_with_axes() -> None:
    async def look(browser: Browser) -> None:
        await browser.goes("?job=7")
        await browser.sees("Ranks (1024)")
        count = "document.querySelectorAll('.map .node').length + ' ' + document.querySelectorAll('.map .gpu').length"
        assert await browser.evaluate(count) == "128 1024"
        named = await browser.evaluate("document.querySelector('.node.named').getAttribute('aria-label')")
        assert named == "node0001: rank 8 gone, or named by an incident; rank 9-15 works"
        late = "document.querySelector('.map .gpu.L')"
        assert await browser.evaluate(f"{late}.textContent + ' ' + {late}.title") == (
            "L rank 5: late: the others wait for it 50 % of the time"
        )
        assert await browser.evaluate(f"{late}.closest('.node').getAttribute('aria-label')") == (
            "node0000: rank 0-4, 6-7 works; rank 5 late: the others wait for it"
        )
        legend = "[...document.querySelectorAll('.legend li')].map((each) => each.textContent)"
        assert "Llate: the others wait for it" in await browser.evaluate(legend)
        assert await browser.evaluate("document.querySelectorAll('main tbody tr').length") == 3
        words = await browser.evaluate(
            "[...document.querySelectorAll('svg.chart text')].map((each) => each.textContent)"
        )
        assert {"runs", "incidents", "actions", "Step time, s", "step", "0", "10", "150"} <= set(words)
        bars = "[...document.querySelectorAll('svg.chart rect')].map((each) => each.getAttribute('class')).join(' ')"
        assert await browser.evaluate(bars) == "start steps stood start steps critical"
        await browser.screenshot(SHOTS / "ranks.png")
        await browser.goes("?job=7&ranks=all")
        await browser.sees("All ranks")
        assert await browser.evaluate("document.querySelectorAll('main tbody tr').length") == 1025

    look_at(FixedController(*large_cluster(256, ranks_each=8)), look)


def test_the_first_screen_and_an_incident_say_what_to_do_and_who_waits_for_whom() -> None:
    async def look(browser: Browser) -> None:
        await browser.sees("Nothing is under way (mode observe).")
        await browser.sees("To do")
        await browser.sees("gpu_fault · job 7 · no decision yet")
        await browser.goes("?incident=abc123")
        await browser.sees("Stack traces")
        picture = await browser.evaluate("document.querySelector('figure svg').getAttribute('aria-label')")
        assert picture == "1,023 ranks: 0-2, 4-1023 (all_reduce) wait for 1 rank: 3 (dataloader)"
        await browser.screenshot(SHOTS / "who-waits.png")

    look_at(FixedController(*large_cluster(6)), look)


NEWS = "the second fault"


async def polls(browser: Browser, controller: FixedController) -> None:
    """Asserts that a page that is open shows what has happened since, without being loaded again."""
    await browser.sees("To do")
    await browser.evaluate("window.opened = 1")
    (first,) = controller.judge.incidents
    controller.judge.incidents = OpenIncidents([first, replace(first, id="def456", summary=NEWS)])
    await browser.sees(NEWS)
    assert await browser.evaluate("window.opened") == 1


def test_the_page_opens_and_is_renewed_with_a_name_and_a_password_in_its_address() -> None:
    async def run() -> None:
        controller = FixedController(*large_cluster(6))
        async with (
            serving(controller, person=SEES_ALL) as url,
            Browser(url.replace("http://", "http://ann:secret@")) as browser,
        ):
            await polls(browser, controller)
            await browser.screenshot(SHOTS / "credentials.png")
            assert all(each.startswith(f"asked {url}") for each in browser.errors), browser.errors

    asyncio.run(run())


def test_the_page_works_behind_a_proxy_that_serves_it_below_a_prefix() -> None:
    async def run() -> None:
        controller = FixedController(*large_cluster(6))
        async with (
            serving(controller, person=SEES_ALL) as url,
            behind_prefix(url) as outside,
            Browser(outside) as browser,
        ):
            await polls(browser, controller)
            await browser.evaluate("document.querySelector('main a').click()")
            await browser.sees("Stack traces")
            assert await browser.evaluate("getComputedStyle(document.querySelector('.card')).borderLeftWidth") == "4px"
            assert await browser.evaluate("location.pathname + location.search") == "/watchdog/?incident=abc123"
            status = "fetch(document.querySelector('a[download]').href).then((answer) => answer.status)"
            assert await browser.evaluate(status) == 200
            await browser.screenshot(SHOTS / "prefix.png")
            assert browser.errors == []

    asyncio.run(run())


@contextlib.asynccontextmanager
async def behind_prefix(url: str) -> AsyncIterator[str]:
    """A reverse proxy as sites have one: what is below /watchdog/ is asked at `url`, all else is not there."""

    async def forward(request: web.Request) -> web.Response:
        async with ClientSession() as session, session.get(url + request.path_qs.removeprefix("/watchdog")) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application()
    app.router.add_get("/watchdog/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/watchdog"
    finally:
        await runner.cleanup()


def test_who_why_and_what_was_done_is_there_without_javascript() -> None:
    async def look(browser: Browser) -> None:
        await browser.ask("Emulation.setScriptExecutionDisabled", value=True)
        for place, texts in (
            (
                "?",
                (
                    "1 incident firing",
                    "fell off the bus",
                    "Nothing is under way",
                    "no decision yet",
                    "node0001",
                ),
            ),
            ("?incident=abc123", ("fell off the bus", "Suspects", "GPU-node0001-0", "Stack traces", "Timeline")),
            ("?job=7", ("From its first run to now", "Step time", "Ranks (")),
            ("?node=node0001", ("What happened before", "Its GPUs")),
            ("?q=gpu_fault", ("fell off the bus", "Jobs (0)")),
        ):
            await browser.goes(place)
            for text in texts:
                await browser.sees(text)
            await browser.screenshot(SHOTS / f"no-javascript-{place[1:4] or 'first'}.png")

    look_at(FixedController(*large_cluster(6, ranks_each=8)), look)


def test_in_the_dark_the_page_is_dark() -> None:
    async def look(browser: Browser) -> None:
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        await browser.ask("Emulation.setEmulatedMedia", features=[dark])
        await browser.sees("What is wrong")
        colours = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
        assert await browser.evaluate(colours) == "rgb(21, 23, 27)rgb(230, 231, 234)"
        await browser.screenshot(SHOTS / "dark.png")

    look_at(FixedController(*large_cluster(6)), look)


@pytest.mark.thorough
def test_a_filter_is_typed_kept_in_the_address_and_holds_where_that_is_opened() -> None:
    nodes = "[...document.querySelectorAll('.map .node')].map((each) => each.textContent.slice(0, 8)).join(' ')"

    async def look(browser: Browser) -> None:
        await browser.sees("Nodes and their GPUs (60)")
        await browser.evaluate("document.getElementById('filter').focus()")
        await browser.ask("Input.insertText", text="node000 NAMED")
        await browser.sees("Nodes and their GPUs (1)")
        assert await browser.evaluate(nodes) == "node0001"
        assert await browser.evaluate("location.search") == "?q=node000+NAMED"
        await browser.goes("?q=gpu_fault")
        await browser.sees("fell off the bus")
        await browser.sees("Jobs (0)")
        assert await browser.evaluate("document.getElementById('filter').value") == "gpu_fault"
        await browser.goes("?incidents&q=nothing-of-this")
        await browser.sees("None so far.")

    look_at(FixedController(*large_cluster(60)), look)


@pytest.mark.thorough
def test_a_screen_reader_finds_a_name_for_every_picture_table_field_and_link() -> None:
    unnamed = """[...document.querySelectorAll('svg, input, a, .scroll, table')].filter((each) =>
      !(each.getAttribute('aria-label') || each.labels?.length || each.caption || each.textContent.trim())).length
      + ' ' + document.querySelectorAll('h1').length + ' ' + document.querySelectorAll('main h1, main h3').length"""

    async def look(browser: Browser) -> None:
        for place, text in (
            ("?", "What is wrong"),
            ("?job=7", "From its first run to now"),
            ("?incident=abc123", "Stack traces"),
            ("?node=node0001", "Its GPUs"),
            ("?nodes", "Nodes with a past"),
        ):
            await browser.goes(place)
            await browser.sees(text)
            assert await browser.evaluate(unnamed) == "0 1 0", place

    look_at(FixedController(*large_cluster(60, ranks_each=8)), look)


def test_on_a_phone_nothing_is_wider_than_the_screen() -> None:
    async def look(browser: Browser) -> None:
        await browser.resize(*PHONE, phone=True)
        for place, text in (
            ("?", "What is wrong"),
            ("?job=7", "Step time"),
            ("?incident=abc123", "Evidence"),
            ("?node=node0001", "Its GPUs"),
            ("?nodes", "Nodes with a past"),
        ):
            await browser.goes(place)
            await browser.sees(text)
            assert await browser.evaluate("document.documentElement.scrollWidth") <= PHONE[0], place
            await browser.screenshot(SHOTS / f"phone-{text.split()[0].lower()}.png")

    look_at(FixedController(*large_cluster(60)), look)


def test_names_that_are_meant_to_harm_are_shown_as_text() -> None:
    async def look(browser: Browser) -> None:
        for place in ("?", "?job=7", "?incident=abc123", "?incidents", "?node=node0001"):
            await browser.goes(place)
            await browser.sees("fell off the bus" if place == "?incidents" else "<img src=x onerror=")
            assert await browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
            assert str(await browser.evaluate("document.title")).endswith("slurm-watchdog made-up")
        card = str(await browser.evaluate("document.querySelector('.card').innerText"))
        assert "49" not in re.sub(r"[\d:]+", lambda time: "" if ":" in time[0] else time[0], card)

    look_at(FixedController(*large_cluster(6, name=HOSTILE)), look)


@pytest.mark.thorough
def test_what_does_not_exist_is_said_and_the_page_goes_on() -> None:
    async def run() -> None:
        async with (
            serving(FixedController(*large_cluster(6)), person=SEES_ALL) as url,
            Browser(url) as browser,
        ):
            await browser.sees("Nodes and their GPUs (6)")
            await browser.goes("?job=99")
            await browser.sees("job '99' is not running, or not watched")
            await browser.goes("?job=5")
            await browser.sees("Job 5, which does not run")
            await browser.sees("1 run, 1 incident")
            await browser.goes("?node=nowhere")
            await browser.sees("Unknown node: Slurm does not list it")
            await browser.goes("?")
            await browser.sees("1 incident firing")

    asyncio.run(run())


@pytest.mark.thorough
def test_a_hang_on_a_real_cluster_is_seen_with_its_stacks_side_by_side(cluster: Cluster) -> None:
    port = free_port()
    password = cluster.directory / "page-password"
    password.touch(mode=0o600)
    password.write_text("typed once, in a browser\n")
    settings = {
        "controller": {"page_listen": f"127.0.0.1:{port}"},
        "security": {"page_token_file": str(password)},
    }
    with Watchdog(cluster, mode="observe", settings=settings) as watchdog:
        faults = f"--fault-dir {cluster.shared}/faults"
        (cluster.shared / "faults").mkdir(exist_ok=True)
        (cluster.shared / "faults").chmod(0o777)
        output = cluster.shared / "job-%j.out"
        job = cluster.sbatch(
            train_script(cluster, f"--steps 100000 --step-seconds 0.3 --save-interval 10 {faults}"),
            "-N2",
            f"--output={output}",
        )
        watchdog.wait_for(lambda: watchdog.step(job) >= 12, 120, "steps")

        async def look() -> None:
            async with Browser(f"http://127.0.0.1:{port}", password="typed once, in a browser") as browser:
                await browser.sees("OK: 1 job watched (1 training)")
                await browser.sees(job)
                (cluster.shared / "faults" / "dataloader_hang.rank3").touch()
                await browser.sees("collective_hang")
                await browser.screenshot(SHOTS / "cluster.png")
                await browser.goes(f"?job={job}")
                await browser.sees("Ranks (4)")
                await browser.screenshot(SHOTS / "job.png")
                incident = watchdog.firing(job, "collective_hang")
                await browser.goes(f"?incident={incident['id']}")
                await browser.sees("Stack traces")
                odd = await browser.evaluate("document.querySelector('.group.odd strong').textContent")
                assert odd == "1 rank: 3"
                await browser.sees("Timeline")
                await browser.resize(1280, 1600)
                await browser.screenshot(SHOTS / "incident.png")
                watchdog.kill_controller()
                await browser.sees("The controller does not answer")
                await browser.sees("Stack traces")
                browser.errors.clear()
                watchdog.start_controller()
                await browser.sees("mode observe")

        asyncio.run(look())
