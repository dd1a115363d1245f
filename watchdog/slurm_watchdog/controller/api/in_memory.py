"""Hands a request that another server has taken to an aiohttp application, without a socket between them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

from slurm_watchdog.wire.http_messages import Answer, Request, refusal

METHODS: Final = frozenset({"GET", "POST"})
PLAIN: Final = re.compile(r"[\x20-\x7e]*")
"""Of a line that is put together here: nothing in it ends the line."""


class _Pipe(asyncio.Transport):
    """The connection of one request: what is written is kept, until the application closes it."""

    def __init__(self, protocol: asyncio.Protocol):
        super().__init__()
        self._protocol, self._closing = protocol, False
        self.said = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said += data

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._end)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        """All of it has been said."""

    resume_reading = pause_reading

    def _end(self) -> None:
        self._protocol.connection_lost(None)
        if not self.over.done():
            self.over.set_result(None)


async def answer_in_memory(protocol: Callable[[], asyncio.Protocol], request: Request) -> Answer:
    """What the application behind `protocol`, an aiohttp `AppRunner.server`, answers. It finishes what it has
    begun, also when nobody waits any more."""
    if request.method not in METHODS:
        return refusal(405, "there are GET and POST")
    lines = (f"{request.method} {request.target} HTTP/1.1", f"Authorization: {request.authorization}")
    if not all(PLAIN.fullmatch(line) for line in lines):
        return refusal(400, "a request is written in printable ASCII")
    head = "\r\n".join((*lines, "Host: localhost", f"Content-Length: {len(request.body)}", "Connection: close"))
    one = protocol()
    pipe = _Pipe(one)
    one.connection_made(pipe)
    one.data_received(f"{head}\r\n\r\n".encode("ascii") + request.body)
    await pipe.over
    first, _, body = bytes(pipe.said).partition(b"\r\n\r\n")
    if not first:
        return refusal(500, "this request failed; see the log of the controller")
    return Answer(body, int(first.split(b" ", 2)[1]))
