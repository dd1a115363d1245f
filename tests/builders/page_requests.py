"""Requests to the page of a controller with an incident of job 7, as a browser or a proxy makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.api.web_page import make_page
from tests.builders.open_doors import Controller

PASSWORD = "correct-horse-battery"
HEADERS = {"Authorization": f"Bearer {PASSWORD}"}
PROXY = "page_proxy_header: X-Remote-User, page_proxies: [127.0.0.1], page_token_file: /x"
INCIDENT, EVIDENCE = "/v1/incidents/abc123", "/v1/incidents/abc123/evidence/1"
Headers = Mapping[str, str | None]
"""In the place of those of HEADERS; None takes one out."""


def controller(place: Path, security: str) -> Any:
    """`security`: the section's text, such as PROXY."""
    found: Any = Controller(place)
    found.config = parse_config(f"security: {{{security}}}\n")
    return found


def named(user: str) -> dict[str, str | None]:
    """The header in which a proxy names who has logged in."""
    return {"X-Remote-User": user}


def get(controller: Any, path: str, *, headers: Headers, source: str = "127.0.0.1") -> tuple[int, Any]:
    """(status, answer) to a request from the address `source`."""
    return _answers(controller, path, [headers], source)[0]


def gets(controller: Any, *headers: Headers, source: str = "127.0.0.1") -> list[int]:
    """The statuses of requests for an incident, one after the other."""
    return [status for status, _ in _answers(controller, INCIDENT, headers, source)]


def _answers(controller: Any, path: str, requests: Any, source: str) -> list[tuple[int, Any]]:
    async def run() -> list[tuple[int, Any]]:
        runner = web.AppRunner(make_page(controller, PASSWORD), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url, found = f"http://127.0.0.1:{runner.addresses[0][1]}{path}", []
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(source, 0))) as session:
                for each in requests:
                    given = {name: value for name, value in (HEADERS | each).items() if value is not None}
                    async with session.get(url, headers=given) as answer:
                        found.append((answer.status, await answer.json()))
        finally:
            await runner.cleanup()
        return found

    return asyncio.run(run())
