"""The pictures of the page in docs/images, over a cluster that is made up: `make screenshots`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.integration.chromium import Browser
from tests.page_server import SEES_ALL, FixedController, large_cluster, serving

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PLACES = {
    "first-screen": ("?", "To do"),
    "job": ("?job=7", "Ranks ("),
    "who-waits": ("?incident=abc123", "Stack traces"),
}
"""File -> where it is, and words that are there once it is drawn."""
WIDTH, HEIGHT = 1000, 760


async def take() -> None:
    controller = FixedController(*large_cluster(32, ranks_each=8))
    async with serving(controller, person=SEES_ALL) as url, Browser(url, WIDTH, HEIGHT) as browser:
        for name, (place, words) in PLACES.items():
            await browser.goes(place)
            await browser.sees(words)
            file = IMAGES / f"{name}.png"
            await browser.screenshot(file)
            print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    asyncio.run(take())
