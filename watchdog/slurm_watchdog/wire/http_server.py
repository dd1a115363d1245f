"""The agents' and the users' port: as much of HTTP/1.1 (RFC 9112) as Prometheus, health checks and our own commands
speak, and not more; and streams of agents, which begin with a byte that no request begins with.

A connection is one small object without a task of its own, and a request is parsed in its buffer: 2 KiB a
connection and 50 to 94 µs of CPU a request, where aiohttp's server takes 10 KiB and 124 to 183 µs (4,000 kept
connections, bodies of 2 kB, two runs of each). Everything is bounded: the head, the body, the time for both, the
answers that a client does not read. What is not understood is refused, and the connection closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

from slurm_watchdog.base import clock
from slurm_watchdog.identity.tls import Context, names_of
from slurm_watchdog.identity.transport import check_directory, check_peer
from slurm_watchdog.wire.http_messages import (
    MAX_HEAD,
    Admission,
    Answer,
    BadRequest,
    Handler,
    Head,
    Refusal,
    Refused,
    Request,
    parse_head,
)
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS, Limits
from slurm_watchdog.wire.stream_server import Stream, StreamDoor
from slurm_watchdog.wire.tls_transport import TlsConnection

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 5.0  # Time between two sweeps over connections that are too slow or idle.
LAG_CHECK_S = 0.5  # Time between two measurements of this loop's own lag.
IDLE_S = 120.0  # A connection on which nothing has been asked for so long is closed; agents report every few seconds.
LAG_MEMORY_S = 300.0  # Lag is remembered for so long: no request takes longer.
LOG_INTERVAL_S = 60.0  # A refusal of the same kind is written to the log once in this time; the metric counts them all.


class Server:
    """All connections of one port. One event loop owns it."""

    def __init__(  # noqa: PLR0913 - one port, and all that it is made of
        self,
        handle: Handler,
        admit: Admission,
        refuse: Refusal,
        max_body: int,
        deadline_s: float,
        *,
        tls: Context | None = None,
        count: Callable[[str], None] = lambda reason: None,
        limits: Limits | None = None,
        only_uid: int | None = None,
        streams: StreamDoor | None = None,
    ):
        """With `tls` clients have to show a certificate. `count` is called with the reason of each refused connection.
        `streams`: what takes the frames of agents; None where none come.

        With `only_uid` it listens on a unix socket, and no process of another user gets a connection.
        """
        self.only_uid = only_uid
        self.handle = handle
        self.admit = admit
        self.refuse = refuse
        self.max_body = max_body
        self.deadline_s = deadline_s  # A request has to arrive whole within this time of its first byte.
        self.tls = tls
        self.limits = limits or Limits()
        self.streams = streams
        self.connections: set[Connection | Stream] = set()
        self.secured: set[TlsConnection] = set()
        self.held = 0  # Bytes of requests that are not whole yet.
        self.ends: Callable[[], Awaitable[None]] | None = None  # Closed together with the server.
        self._count = count
        self._logged_at: dict[str, float] = {}
        self._late: deque[tuple[float, float]] = deque()  # (when, seconds) this loop was late, of the last minutes.
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, backlog: int) -> int:
        """Listens; returns the port. Raises OSError."""
        if self.only_uid is not None:
            raise ValueError("what is one user's is not served on a port")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, host, port, backlog=backlog)
        self._sweeper = asyncio.create_task(self._sweep())
        return int(self._server.sockets[0].getsockname()[1])

    async def start_unix(self, path: str, backlog: int) -> None:
        """Listens at `path` for `only_uid` alone. Raises OSError: AnotherUser if others may enter its directory."""
        if self.only_uid is None:
            raise ValueError("the socket's owner is required")
        check_directory(os.path.dirname(path), self.only_uid)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._protocol, path, backlog=backlog)
        self._sweeper = asyncio.create_task(self._sweep())

    def _protocol(self) -> asyncio.Protocol:
        if self.tls is None:
            return Connection(self)
        return TlsConnection(Connection(self), self.tls.current, self)

    async def cleanup(self) -> None:
        """Closes everything."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for connection in self._all():
            connection.close()
        if self.ends is not None:
            await self.ends()

    def opened(self, address: str) -> bool:
        """A client connected; False if it can't stay. Each has to be `closed`."""
        reason = self.limits.opened(address, clock.monotonic())
        if reason:
            self.count_refused(reason, address)
        return not reason

    def is_own(self, transport: asyncio.Transport) -> bool:
        """Whether the client may be here by its user: always, but on one user's own socket."""
        if self.only_uid is None:
            return True
        try:
            check_peer(transport.get_extra_info("socket"), self.only_uid)
        except OSError as error:
            log.warning("%s", error)
            self.count_refused("another_user", "")
            return False
        return True

    def closed(self, address: str) -> None:
        self.limits.closed(address)

    def count_refused(self, reason: str, address: str) -> None:
        """Counts a connection that came to nothing."""
        now = clock.monotonic()
        self._count(reason)
        if not reason.startswith("too_many"):
            self.limits.failed(address, now)
        if now - self._logged_at.get(reason, float("-inf")) >= LOG_INTERVAL_S:
            self._logged_at[reason] = now
            log.warning("a connection from %s was refused: %s", address, CONNECTION_REASONS[reason])

    def refresh(self) -> None:
        """Takes over certificates that were replaced. Clients of the previous authority have to reconnect."""
        if self.tls is None or not self.tls.refresh():
            return
        if self.tls.new_authority:
            for connection in self._all():
                connection.close()

    def lag_s(self, since: float) -> float:
        """How long this loop was busy with others since then: time that no client can be blamed for.

        Without it ten thousand handshakes at once, after a restart, would each be found too slow, and retried
        without end.
        """
        total_s = 0.0
        for when, late_s in reversed(self._late):
            if when <= since:
                break
            total_s += late_s
        return total_s

    def record_lag(self, now: float, late_s: float) -> None:
        """Records that the loop reached this moment so many seconds late."""
        if late_s > LAG_CHECK_S:
            self._late.append((now, late_s))
        while self._late and self._late[0][0] < now - LAG_MEMORY_S:
            self._late.popleft()

    async def _sweep(self) -> None:
        swept = clock.monotonic()
        while True:
            before = clock.monotonic()
            await asyncio.sleep(LAG_CHECK_S)
            now = clock.monotonic()
            self.record_lag(now, now - before - LAG_CHECK_S)
            if now - swept < SWEEP_INTERVAL_S:
                continue
            swept = now
            self.refresh()
            for connection in self._all():
                connection.check(now)

    def _all(self) -> list[Connection | Stream | TlsConnection]:
        return [*self.connections, *self.secured]


class Connection(asyncio.Protocol):
    """One client. `since` is when the request that is arriving began, or when the last one was answered."""

    __slots__ = (
        "_arriving",
        "_held",
        "_inbox",
        "_names",
        "_remote",
        "_served",
        "_server",
        "_since",
        "_task",
        "_transport",
    )

    def __init__(self, server: Server):
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._inbox = bytearray()
        self._remote = ""
        self._since = clock.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._arriving: tuple[Head, int] | None = None
        """The head of the request whose body is arriving, read once, and where it ends."""
        self._served = False  # It has asked something that was answered.
        self._held = 0  # Bytes of the inbox that the server has counted.
        self._names: frozenset[str] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's own is one by its methods only
        self._transport = transport
        transport.set_write_buffer_limits(high=self._server.limits.unread_bytes)
        peer = transport.get_extra_info("peername")
        self._remote = peer[0] if peer else ""
        self._server.connections.add(self)
        certificate = transport.get_extra_info("peercert")
        if certificate is not None and self._server.tls is not None:
            self._names = names_of(certificate, self._server.tls.domain)
        elif not self._server.opened(self._remote) or not self._server.is_own(transport):
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._transport = None
        if self._names is None:
            self._server.closed(self._remote)
        self._settle(0)
        if self._task is not None:
            self._task.cancel()
        if self._inbox:
            self._server.refuse("cut_off", 400, "the connection broke before the report had arrived")

    def pause_writing(self) -> None:
        """The client sends requests and does not read its answers."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._inbox:
            if data[0] == 0 and self._server.streams is not None and self._transport is not None:
                self._become_stream(self._server.streams, self._transport, data)
                return
            self._since = clock.monotonic()
        self._inbox += data
        if self._task is None:
            self._serve()
        elif len(self._inbox) > self._server.max_body + MAX_HEAD:
            self._give_up(self._server.refuse("too_large", 413, "too much at once"))
        self._settle(len(self._inbox))
        if self._inbox and self._server.held > self._server.limits.held_bytes:
            self._give_up(self._server.refuse("busy", 503, "too much is arriving at once: try again"))
            self._settle(0)

    def _become_stream(self, door: StreamDoor, transport: asyncio.Transport, data: bytes) -> None:
        stream = Stream(self._server, door, transport, self._remote, self._names)
        self._server.connections.discard(self)
        self._server.connections.add(stream)
        transport.set_protocol(stream)
        stream.data_received(data)

    def _settle(self, held: int) -> None:
        self._server.held += held - self._held
        self._held = held

    def check(self, now: float) -> None:
        """Ends what takes too long."""
        age_s = now - self._since - self._server.lag_s(self._since)
        if self._inbox and self._task is None and age_s > self._server.deadline_s:
            limit_s = self._server.deadline_s
            sentence = f"a request has to arrive within {limit_s:.0f} s"
            self._give_up(self._server.refuse("too_slow", 408, sentence))
        elif not self._inbox and self._task is None and age_s > (IDLE_S if self._served else self._server.deadline_s):
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- requests ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answers all requests that have arrived whole, in order."""
        while self._inbox and self._transport is not None and self._task is None:
            try:
                found = self._next_request()
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
                answer = request if isinstance(request, Answer) else self._server.handle(request)
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
        self._settle(len(self._inbox))

    def _answer(self, answer: Answer, keep: bool) -> None:
        if self._transport is None:
            return
        self._since = clock.monotonic()
        self._served = True
        reason = b"OK" if answer.status == 200 else HTTPStatus(answer.status).phrase.encode()
        head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
            answer.status, reason, answer.content_type, len(answer.body), b"" if keep else b"Connection: close\r\n",
        )  # fmt: skip
        self._transport.write(head + answer.body)
        if not keep:
            self._transport.close()

    def _give_up(self, answer: Answer) -> None:
        """Answers and closes: where the next request would begin is unknown."""
        self._inbox.clear()
        self._arriving = None
        self._answer(answer, False)

    def _next_request(self) -> tuple[Request | Answer, bool] | None:
        """The first request of the inbox, or what refuses it, and whether the connection stays; None: not all
        of it is there.

        Raises BadRequest, Refused.
        """
        inbox = self._inbox
        if self._arriving is None:
            end = inbox.find(b"\r\n\r\n", 0, MAX_HEAD)
            if end < 0:
                if len(inbox) > MAX_HEAD:
                    raise BadRequest("garbage", 431, f"the head of a request may have {MAX_HEAD} bytes")
                return None
            head = parse_head(bytes(inbox[:end]))
            if head.size > self._server.max_body:
                raise BadRequest("too_large", 413, f"a request may have {self._server.max_body} bytes")
            total = end + 4 + head.size
            refusal = self._server.admit(head, self._remote)
            if refusal is not None and len(inbox) < total:
                raise Refused(refusal)
            if refusal is not None:
                del inbox[:total]
                return refusal, head.keep
            self._arriving = head, end
        head, end = self._arriving
        total = end + 4 + head.size
        if len(inbox) < total:
            return None
        body = bytes(inbox[end + 4 : total])
        del inbox[:total]
        self._arriving = None
        request = Request(
            head.method, head.path, head.authorization, body, self._remote, head.target
        )  # fmt: skip
        return request, head.keep
