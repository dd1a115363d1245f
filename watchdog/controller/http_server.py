"""The agents' port: as much of HTTP/1.1 (RFC 9112) as agents, Prometheus and health checks speak, and not more.

Ten thousand kept connections and two thousand requests a second leave no room for a framework: a connection here is one small object
without a task of its own, and a request is parsed where it lies. Everything is bounded: the head, the body, the time for both, the
answers that somebody does not fetch. What is not understood is refused, and the connection closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast

from watchdog import clock

log = logging.getLogger(__name__)

MAX_HEAD: Final = 16 * 1024
"""nginx and Apache allow 8 KiB a line."""
SWEEP_S: Final = 5.0
"""Time between two looks for connections that are too slow, or are not used any more."""
IDLE_S: Final = 120.0
"""A connection on which nothing has been asked for so long is closed; agents report every few seconds."""
MAX_UNREAD: Final = 4 * 1024**2
"""Bytes of answers that wait for somebody who does not read them; beyond, the connection is closed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, whole."""

    method: str
    path: str
    authorization: str
    body: bytes
    remote: str


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    status: int = 200
    content_type: bytes = b"application/json"


Handler = Callable[[Request], "Answer | Awaitable[Answer]"]
"""Answers at once, or, where it has to ask somebody first, later. Raises nothing."""
Admission = Callable[[str, str], "Answer | None"]
"""(path, authorization): an answer that refuses a request before its body is taken, None if it may come."""
Refusal = Callable[[str, int, str], Answer]
"""(outcome, status, sentence): counts a request that never became one."""


class BadRequest(Exception):
    """What is no request; its arguments are (outcome, status, sentence)."""


class Refused(Exception):
    """A request that is not to send its body."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


class Server:
    """All connections of one port. One event loop owns it."""

    def __init__(self, handle: Handler, admit: Admission, refuse: Refusal, max_body: int, deadline_s: float):
        self.handle = handle
        self.admit = admit
        self.refuse = refuse
        self.max_body = max_body
        self.deadline_s = deadline_s
        """A request has to arrive whole within this time of its first byte."""
        self.connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, backlog: int) -> int:
        """Listens; returns the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=backlog)
        self._sweeper = asyncio.create_task(self._sweep())
        return int(self._server.sockets[0].getsockname()[1])

    async def cleanup(self) -> None:
        """Closes everything."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = clock.monotonic()
            for connection in list(self.connections):
                connection.check(now)


class Connection(asyncio.Protocol):
    """One client. `since` is when the request that is arriving began, or when the last one was answered."""

    __slots__ = ("_inbox", "_promised", "_remote", "_server", "_since", "_task", "_transport")

    def __init__(self, server: Server):
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._inbox = bytearray()
        self._remote = ""
        self._since = clock.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._promised = False
        """The client was told to go on and send its body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's own is one by its methods only
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_UNREAD)
        peer = transport.get_extra_info("peername")
        self._remote = peer[0] if peer else ""
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._transport = None
        if self._task is not None:
            self._task.cancel()
        if self._inbox:
            self._server.refuse("cut_off", 400, "the connection broke before the report had arrived")

    def pause_writing(self) -> None:
        """It asks and asks and does not fetch its answers."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._inbox:
            self._since = clock.monotonic()
        self._inbox += data
        if self._task is None:
            self._serve()
        elif len(self._inbox) > self._server.max_body + MAX_HEAD:
            self._give_up(self._server.refuse("too_large", 413, "too much at once"))

    def check(self, now: float) -> None:
        """Ends what takes too long."""
        age_s = now - self._since
        if self._inbox and self._task is None and age_s > self._server.deadline_s:
            limit_s = self._server.deadline_s
            sentence = f"a report has to arrive within {limit_s:.0f} s"
            self._give_up(self._server.refuse("too_slow", 408, sentence))
        elif not self._inbox and age_s > IDLE_S:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- requests ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answers whatever has arrived whole, in its order."""
        while self._inbox and self._transport is not None and self._task is None:
            try:
                found = self._take()
            except BadRequest as error:
                self._give_up(self._server.refuse(*error.args))
                return
            except Refused as error:
                self._give_up(error.answer)
                return
            if found is None:
                return
            request, keep = found
            try:
                answer = self._server.handle(request)
            except Exception:  # the boundary: one request never ends the others
                log.exception("a request failed")
                answer = Answer(b'{"error":"this request failed; see the log of the controller"}', 500)
            if isinstance(answer, Answer):
                self._answer(answer, keep)
            else:
                self._task = asyncio.ensure_future(self._answer_later(answer, keep))

    async def _answer_later(self, coming: Awaitable[Answer], keep: bool) -> None:
        answer = await coming
        self._task = None
        self._answer(answer, keep)
        self._serve()

    def _answer(self, answer: Answer, keep: bool) -> None:
        if self._transport is None:
            return
        self._since = clock.monotonic()
        reason = b"OK" if answer.status == 200 else HTTPStatus(answer.status).phrase.encode()
        head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
            answer.status, reason, answer.content_type, len(answer.body), b"" if keep else b"Connection: close\r\n",
        )  # fmt: skip
        self._transport.write(head + answer.body)
        if not keep:
            self._transport.close()

    def _give_up(self, answer: Answer) -> None:
        """Where the next request would begin is not known any more."""
        self._inbox.clear()
        self._answer(answer, False)

    def _take(self) -> tuple[Request, bool] | None:
        """The first request of the inbox and whether the connection stays; None: not all of it is there. Raises BadRequest."""
        inbox = self._inbox
        end = inbox.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0:
            if len(inbox) > MAX_HEAD:
                raise BadRequest("garbage", 431, f"the head of a request may have {MAX_HEAD} bytes")
            return None
        head = parse_head(bytes(inbox[:end]))
        if head.size > self._server.max_body:
            raise BadRequest("too_large", 413, f"a report may have {self._server.max_body} bytes")
        total = end + 4 + head.size
        if len(inbox) < total:
            refusal = self._server.admit(head.path, head.authorization)
            if refusal is not None:
                raise Refused(refusal)
            if head.expects and not self._promised and self._transport is not None:
                self._promised = True
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return None
        body = bytes(inbox[end + 4 : total])
        del inbox[:total]
        self._promised = False
        return Request(head.method, head.path, head.authorization, body, self._remote), head.keep


@dataclass(slots=True)
class Head:
    """What the first lines of a request say."""

    method: str
    path: str
    keep: bool
    authorization: str = ""
    size: int = 0
    expects: bool = False
    """It waits to be told to go on."""


def parse_head(data: bytes) -> Head:
    """The lines before the empty one. Raises BadRequest."""
    first, *lines = data.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        raise BadRequest("garbage", 400, "this is no request of HTTP/1.1")
    path = words[1].partition(b"?")[0].decode("ascii", "replace")
    head = Head(words[0].decode("ascii", "replace"), path, words[2] != b"HTTP/1.0")
    sizes = set()
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise BadRequest("garbage", 400, "a line of the head is no header")
        match name.lower():
            case b"content-length":
                sizes.add(value.strip())
            case b"authorization":
                head.authorization = value.strip().decode("latin-1")
            case b"connection":
                head.keep = head.keep and b"close" not in value.lower()
            case b"transfer-encoding":
                raise BadRequest("garbage", 411, "a report has to come with its Content-Length")
            case b"expect":
                head.expects = True
    if sizes:
        head.size = parse_size(sizes)
    return head


def parse_size(sizes: set[bytes]) -> int:
    """A Content-Length; of several headers all have to say the same. Raises BadRequest."""
    if len(sizes) != 1:
        raise BadRequest("garbage", 400, "two lengths for one body")
    (text,) = sizes
    if not text.isdigit() or len(text) > 12:
        raise BadRequest("garbage", 400, "the Content-Length is no number")
    return int(text)
