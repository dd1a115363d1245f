"""Requests to the page of a controller with an incident of job 7, as a browser or a proxy makes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.api.web_page import make_page
from tests.builders.open_doors import Controller

PASSWORD = "correct-horse-battery"
HEADERS = {"Authorization": f"Bearer {PASSWORD}", "X-Slurm-Watchdog-Page": "1"}
"""What a request that changes something needs, where no proxy is."""
PROXY = "page_proxy_header: X-Remote-User, page_proxies: [127.0.0.1], page_token_file: /x"
ACTS_AS = "page_acts_as: daemon, page_token_file: /x"


def controller(place: Path, security: str) -> Any:
    """`security`: the section's text, such as PROXY."""
    found: Any = Controller(place)
    found.config = parse_config(f"security: {{{security}}}\n")
    return found


def post(
    controller: Any, path: str = "/api/pause", *, body: Any = None, headers: dict[str, str | None] | None = None,
    source: str = "127.0.0.1", method: str = "POST",
) -> tuple[int, Any]:  # fmt: skip
    """(status, answer) to a request from the address `source`; `headers` replace those of HEADERS, None takes one out.
    `body` a str: sent as a form would send it."""
    given = {name: value for name, value in (HEADERS | (headers or {})).items() if value is not None}
    sent: Any = {"data": body} if isinstance(body, str) else {"json": body or {}} if method == "POST" else {}

    async def run() -> tuple[int, Any]:
        runner = web.AppRunner(make_page(controller, PASSWORD), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        try:
            connector = aiohttp.TCPConnector(local_addr=(source, 0))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.request(method, url, headers=given, **sent) as answer,
            ):
                return answer.status, await answer.json()
        finally:
            await runner.cleanup()

    return asyncio.run(run())
