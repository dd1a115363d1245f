"""A real Chromium without a window, driven over its own DevTools protocol: what a person would see and type."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from typing_extensions import Self

from slurm_watchdog.base.deadline import timeout

DEADLINE_S = 60.0


class Browser:
    """One page of one browser. Use it as an async context manager."""

    def __init__(self, url: str, width: int = 1280, height: int = 900, *, password: str = ""):
        self.url, self.width, self.height = url, width, height
        self._password = password
        self.errors: list[str] = []
        """What the page complained of, and every address that it asked elsewhere."""
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Self:
        self._home = tempfile.mkdtemp(prefix="slurm-watchdog-browser-")
        self._process = subprocess.Popen(  # noqa: ASYNC220, over in a millisecond
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                f"--user-data-dir={self._home}",
                "--remote-debugging-port=0",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home},
        )
        self._session = aiohttp.ClientSession()
        port_file = Path(self._home, "DevToolsActivePort")
        await self._until(lambda: port_file.exists() and bool(port_file.read_text().strip()))  # made, then written
        port = port_file.read_text().split()[0]  # noqa: ASYNC240, a line
        pages: list[dict[str, str]] = []

        async def listed() -> bool:
            nonlocal pages
            async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            return bool(pages)

        await self._until(listed)
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 28)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.ask(f"{domain}.enable")
        if self._password:  # as a browser sends it once it was typed
            basic = base64.b64encode(f"any:{self._password}".encode()).decode()
            await self.ask("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {basic}"})
        await self.resize(self.width, self.height)
        await self.goes("")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._session.close()
        self._process.kill()
        self._process.wait(timeout=30)
        shutil.rmtree(self._home, ignore_errors=True)

    async def _until(self, condition: Callable[[], bool | Awaitable[bool]]) -> None:
        async with timeout(DEADLINE_S):
            while True:
                found = condition()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.05)

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
                continue
            method, values = said["method"], said.get("params", {})
            if method == "Runtime.exceptionThrown":
                self.errors.append(str(values["exceptionDetails"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
                self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}".rstrip())
            elif method == "Network.requestWillBeSent" and not values["request"]["url"].startswith((self.url, "data:")):
                self.errors.append(f"asked {values['request']['url']}")

    async def ask(self, method: str, **values: object) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        said = await asyncio.wait_for(answer, DEADLINE_S)
        assert "error" not in said, said
        return dict(said["result"])

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        result = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def goes(self, place: str) -> None:
        """To an address of the same page: `?job=7`."""
        await self.ask("Page.navigate", url=f"{self.url}/{place}")

    async def sees(self, text: str) -> None:
        """Waits until this text is on the page."""

        async def there() -> bool:
            return text in str(await self.evaluate("document.readyState === 'complete' ? document.body.innerText : ''"))

        try:
            await self._until(there)
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText")
            raise AssertionError(f"{text!r} is not on the page:\n{shown}\n{self.errors}") from None

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.ask(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **extra,
            )

    async def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    async def screenshot(self, file: Path) -> None:
        shot = await self.ask("Page.captureScreenshot", format="png")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240
