"""Requests to the local socket of a controller, one after the other, by one person."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.policy.access import Person


def asked(controller: Any, person: Person, *requests: tuple[str, str, Any]) -> list[tuple[int, Any]]:
    """What this person is answered, one request after the other: (status, document)."""

    async def ask() -> list[tuple[int, Any]]:
        async with TestClient(TestServer(make_app(controller, lambda _: person))) as client:
            answers = []
            for method, path, body in requests:
                answer = await client.request(method, path, data=None if body is None else json.dumps(body))
                answers.append((answer.status, await answer.json()))
            return answers

    return asyncio.run(ask())
