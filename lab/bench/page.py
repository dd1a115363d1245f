"""The controller's page in a real Chromium: when something is to be seen, and when all of it is."""

from __future__ import annotations

import asyncio
import shutil

from lab.bench.figures import Figures, say
from tests.integration.chromium import Browser
from tests.page_server import SEES_ALL, FixedController, large_cluster, serving

MAX_DEMO_MS = 1000.0
MAX_LARGE_MS = 3000.0
"""What the project promises: with the demo's three nodes, with a thousand."""

MAX_RANKS_MS = 1000.0
DRAWN = "performance.getEntriesByType('navigation')[0].domComplete"


def run(figures: Figures) -> None:
    if shutil.which("chromium") is None:
        say("no chromium here, the page is not measured: apt-get install --no-install-recommends chromium")
        return
    for nodes, bound in ((3, MAX_DEMO_MS), (1000, MAX_LARGE_MS)):
        painted, drawn = asyncio.run(_times_ms(nodes))
        figures.add(f"page.first_paint_{nodes}_nodes_ms", painted, "ms", at_most=bound)
        figures.add(f"page.drawn_{nodes}_nodes_ms", drawn, "ms", at_most=bound)
    figures.add("page.job_of_1024_ranks_ms", asyncio.run(_ranks_ms()), "ms", at_most=MAX_RANKS_MS)


async def _ranks_ms() -> float:
    """From the click on a job of 1,024 ranks until the browser has all of it."""
    async with (
        serving(FixedController(*large_cluster(256, ranks_each=8)), person=SEES_ALL) as url,
        Browser(url) as browser,
    ):
        await browser.sees("Nodes and their GPUs (256)")
        await browser.goes("?job=7")
        await browser.sees("Ranks (1024)")
        return float(await browser.evaluate(DRAWN))


async def _times_ms(nodes: int) -> tuple[float, float]:
    """From the request for the page: until the browser has painted anything, and until every node is drawn."""
    async with (
        serving(FixedController(*large_cluster(nodes)), person=SEES_ALL) as url,
        Browser(url) as browser,
    ):
        await browser.sees(f"Nodes and their GPUs ({nodes})")
        painted = await browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        drawn = await browser.evaluate(DRAWN)
        return float(painted), float(drawn)
