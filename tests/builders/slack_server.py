"""A local server that behaves as Slack does: webhooks and the two methods of its API that we use, with the
ways in which they refuse."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from slurm_watchdog.config.notify import Slack

SECRET = "T0SECRET/B0SECRET/xyzSECRETxyz"
TOKEN = "xoxb-1-SECRETtoken"
CHANNEL = "C024BE91L"


@dataclass
class Answer:
    """What the next request gets in the place of `ok`."""

    status: int = 200
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    cut: bool = False
    """The connection ends without an answer; `taken`: but the message stands in the channel."""
    taken: bool = False
    body: str | None = None


class FakeSlack:
    """Answers as told, `ok` when nothing is left to say; keeps what stands in the channel and in its threads."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.posts: list[dict[str, Any]] = []
        """As a reader sees them, with `ts`; those in threads have `thread_ts`."""
        self.url = ""

    async def webhook(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        self.calls.append(("webhook", message))
        odd = await self._odd(request, message, plain=True)
        if odd is not None:
            return odd
        self._keep(message)
        return web.Response(text="ok")

    async def method(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["method"]
        message = await request.json()
        self.calls.append((name, message))
        odd = await self._odd(request, message, plain=False)
        if odd is not None:
            return odd
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"ok": False, "error": "invalid_auth"})
        if message.get("channel") != CHANNEL:
            return web.json_response({"ok": False, "error": "channel_not_found"})
        if name == "chat.update":
            for post in self.posts:
                if post["ts"] == message["ts"]:
                    post.update(text=message["text"], blocks=message["blocks"])
                    return web.json_response({"ok": True, "ts": message["ts"], "channel": CHANNEL})
            return web.json_response({"ok": False, "error": "message_not_found"})
        thread = message.get("thread_ts")
        if thread is not None and all(post["ts"] != thread for post in self.posts):
            return web.json_response({"ok": False, "error": "thread_not_found"})
        problem = too_long(message)
        if problem:
            return web.json_response({"ok": False, "error": problem})
        return web.json_response({"ok": True, "channel": CHANNEL, "ts": self._keep(message)})

    def _keep(self, message: dict[str, Any]) -> str:
        ts = f"1700000000.{len(self.posts):06d}"
        self.posts.append({**message, "ts": ts})
        return ts

    async def _odd(self, request: web.Request, message: dict[str, Any], *, plain: bool) -> web.StreamResponse | None:
        if not self.answers:
            return None
        answer = self.answers.pop(0)
        if answer.taken:
            self._keep(message)
        await asyncio.sleep(answer.hang_s)
        if answer.cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if answer.body is not None:
            return web.Response(status=answer.status, text=answer.body, content_type="text/html")
        if plain and (answer.status != 200 or answer.error):
            said = answer.error or f"no {request.path} {SECRET}"
            return web.Response(status=answer.status, text=said, headers=answer.headers)
        if answer.status != 200 or answer.error:
            document = {"ok": False, "error": answer.error or "internal_error"}
            return web.json_response(document, status=answer.status, headers=answer.headers)
        return None

    def in_channel(self) -> list[dict[str, Any]]:
        """What stands in the channel itself."""
        return [post for post in self.posts if "thread_ts" not in post]

    def below(self, post: dict[str, Any]) -> list[dict[str, Any]]:
        """The thread of one of them."""
        return [each for each in self.posts if each.get("thread_ts") == post["ts"]]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeSlack]:
        app = web.Application()
        app.router.add_post(f"/services/{SECRET}", self.webhook)
        app.router.add_post("/api/{method}", self.method)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def hook(self, directory: Path) -> Slack:
        """The configuration of its incoming webhook."""
        file = directory / "webhook"
        file.write_text(f"{self.url}/services/{SECRET}\n")
        return Slack(webhook_url_file=str(file))

    def bot(self, directory: Path, channel: str = CHANNEL) -> Slack:
        """That of a bot."""
        return Slack(token_file=self.token_file(directory), channel=channel, api_url=f"{self.url}/api/")

    def token_file(self, directory: Path) -> str:
        file = directory / "slack-token"
        file.write_text(f"{TOKEN}\n")
        return str(file)


LIMITS = {"header": 150, "section": 3000, "field": 2000, "context": 3000}
"""Characters: https://docs.slack.dev/reference/block-kit/blocks; ten fields a section, ten elements a
context, 50 blocks a message."""


def shown(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(where, text object) of everything that a reader sees in the blocks of a message."""
    found = []
    for block in message.get("blocks", []):
        found += [(block["type"], block["text"])] if "text" in block else []
        found += [("field", each) for each in block.get("fields", ())]
        found += [(block["type"], each) for each in block.get("elements", ())]
    return found


def marked(message: dict[str, Any]) -> list[str]:
    """The texts in which Slack reads marks, without the links."""
    return [text["text"] for where, text in shown(message) if text["type"] == "mrkdwn" and where != "context"]


def too_long(message: dict[str, Any]) -> str:
    """The error that Slack would answer for its size; the sum over all blocks as others have measured it (see
    BLOCK_LIMIT)."""
    blocks = message.get("blocks", [])
    texts = [text["text"] for _, text in shown(message)]
    if len(blocks) > 50 or any(not 0 < len(text["text"]) <= LIMITS[where] for where, text in shown(message)):
        return "invalid_blocks"
    if any(len(block.get("fields", ())) > 10 or len(block.get("elements", ())) > 10 for block in blocks):
        return "invalid_blocks"
    if sum(map(len, texts)) > 9597 or len(json.dumps(message)) > 40_000:
        return "msg_blocks_too_long"
    return "msg_too_long" if len(message["text"]) > 4000 else ""


def with_slack(slack: FakeSlack, body: Callable[[FakeSlack], Awaitable[None]]) -> None:
    """Runs `body` while the server listens."""

    async def go() -> None:
        async with slack.listening():
            await body(slack)

    asyncio.run(asyncio.wait_for(go(), 60))


@contextmanager
def slack_beside() -> Iterator[FakeSlack]:
    """The server while the block runs, in a thread: for a controller that is a process of its own."""
    slack, loop, listens, over = FakeSlack(), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with slack.listening():
            listens.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert listens.wait(10)
    try:
        yield slack
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
