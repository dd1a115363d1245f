"""A receiver of JSON on this machine: answers as a test wants, and keeps what it was sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class JsonReceiver:
    """Answers as told, 200 when nothing is left to say; keeps (path, headers, document)."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.got: list[tuple[str, Any, Any]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.got.append((request.path, request.headers, await request.json()))
        status, text = self.answers.pop(0) if self.answers else (200, "")
        return web.Response(status=status, text=text, headers={"Location": "http://127.0.0.1:1/elsewhere"})

    def documents(self) -> list[Any]:
        return [document for _, _, document in self.got]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[JsonReceiver]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
