"""One port of the controller: HTTP for people and programs, by aiohttp, and streams of agents, which begin with a byte
that no request begins with.

Everything is bounded here, before a handler is called: connections in all and of each address, the head and the body of
a request, the time for both, the bytes of all that has not arrived whole, the answers that a client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.identity.tls import Context, names_of
from slurm_watchdog.identity.transport import check_directory, check_peer
from slurm_watchdog.wire.connection import Connection, TlsConnection
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS, Limits
from slurm_watchdog.wire.stream_server import Stream, StreamDoor

log = logging.getLogger(__name__)

MAX_HEAD = 16 * 1024  # nginx and Apache allow 8 KiB a line, and so does aiohttp.
BACKLOG = 4096  # Connections that wait to be accepted: after a restart all come. The kernel takes somaxconn, if less.
DEADLINE_S = 20.0  # A request, or a frame, has to arrive whole within this time: a slow sender holds nothing open.
SWEEP_INTERVAL_S = 5.0  # Time between two sweeps over connections that are too slow or idle.
TURN_S = 0.02  # So long frames are taken without a break.
LAG_CHECK_S = 0.5  # Time between two measurements of this loop's own lag.
IDLE_S = 120.0  # A connection on which nothing has been asked for so long, or too little of an answer read, is closed.
READ_IN_IDLE = 1024 * 1024  # Bytes of a long answer that have to be read in that time: 9 kB/s.
LAG_MEMORY_S = 300.0  # Lag is remembered for so long: no request takes longer.
LOG_INTERVAL_S = 60.0  # A refusal of the same kind is written to the log once in this time; the metric counts them all.
LINGER_S = 1.0  # What is left of a refused request is thrown away for so long, so that its answer is read.
END_S = 1.0  # For requests under way when the port is closed.

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Admission = Callable[[web.Request], web.Response | None]  # What refuses a request before its body.


def refusal(status: int, sentence: str) -> web.Response:
    """Why it is refused, as JSON."""
    return web.json_response({"error": sentence}, status=status)


class Port:
    """All connections of one port, or of one unix socket. One event loop owns it."""

    def __init__(  # noqa: PLR0913 - one port, and all that it is made of
        self,
        app: web.Application,
        max_body: int,
        *,
        admit: Admission = lambda request: None,
        refused: Callable[[str], None] = lambda outcome: None,
        count: Callable[[str], None] = lambda reason: None,
        limits: Limits | None = None,
        tls: Context | None = None,
        only_uid: int | None = None,
        streams: StreamDoor | None = None,
    ):
        """`app` answers HTTP, with bodies of `max_body` bytes at most. `refused` is called with the outcome of each
        request that is refused here, `count` with the reason of each refused connection. With `tls` clients have to
        show a certificate; with `only_uid` it listens on a unix socket, and no process of another user gets a
        connection. `streams`: what takes the frames of agents; None where none come."""
        self.only_uid = only_uid
        self.deadline_s = DEADLINE_S
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.held = 0  # Bytes of requests and frames that are not whole yet.
        self.most_held = MAX_HEAD + max_body  # Of one request.
        self.refused = refused
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=END_S)
        app.middlewares.append(self._serve_whole)
        self._max_body, self._admit, self._count = max_body, admit, count
        self._tls, self._streams = tls, streams
        self._waiting: deque[Stream] = deque()  # With what has arrived: served in turns.
        self._logged_at: dict[str, float] = {}
        self._late: deque[tuple[float, float]] = deque()  # (when, seconds) this loop was late, of the last minutes.
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, backlog: int = BACKLOG) -> int:
        """Listens; returns the port. Raises OSError."""
        if self.only_uid is not None:
            raise ValueError("what is one user's is not served on a port")
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, host, port, backlog=backlog)
        self._sweeper = asyncio.create_task(self._sweep())
        return int(self._server.sockets[0].getsockname()[1])

    async def start_unix(self, path: str, backlog: int = BACKLOG) -> None:
        """Listens at `path`: for streams only where it is one user's. Raises OSError: AnotherUser if others may enter
        his directory."""
        if self.only_uid is not None:
            check_directory(os.path.dirname(path), self.only_uid)
        elif self._streams is not None:
            raise ValueError("the socket's owner is required")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._protocol, path, backlog=backlog)
        self._sweeper = asyncio.create_task(self._sweep())

    async def cleanup(self) -> None:
        """Closes everything."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.end()
        await self._runner.cleanup()

    # -- connections -------------------------------------------------------------------------------------------

    def _protocol(self) -> asyncio.Protocol:
        return Connection(self) if self._tls is None else TlsConnection(self, self._tls.current)

    def serve(self, first: int, transport: asyncio.Transport, client: Connection) -> Stream | Requests:
        """What takes the bytes of a client from the `first` on."""
        if first == 0 and self._streams is not None:
            return Stream(self, self._streams, transport, client.remote, client.names)
        assert self._runner.server is not None
        return Requests(self, self._runner.server, transport)

    def serve_soon(self, stream: Stream) -> None:
        """Has its frames taken in its turn: all that ten thousand agents send at once would hold up timers, and with
        them the judging, for seconds."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._serve_turn)
        self._waiting.append(stream)

    def _serve_turn(self) -> None:
        until = clock.monotonic() + TURN_S
        while self._waiting and clock.monotonic() < until:
            self._waiting.popleft().serve()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._serve_turn)

    def names_of(self, certificate: Mapping[str, Any]) -> frozenset[str]:
        """The nodes that a client's certificate is for."""
        return names_of(certificate, "" if self._tls is None else self._tls.domain)

    def opened(self, address: str) -> bool:
        """A client connected; False if it can't stay. Each has to be `closed`."""
        reason = self.limits.opened(address, clock.monotonic())
        if reason:
            self.count_refused(reason, address)
        return not reason

    def closed(self, address: str) -> None:
        self.limits.closed(address)

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
        if self._tls is not None and self._tls.refresh() and self._tls.new_authority:
            for connection in list(self.connections):
                connection.end()

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
            for connection in list(self.connections):
                connection.check(now)

    # -- requests ----------------------------------------------------------------------------------------------

    def refuse(self, outcome: str, status: int, sentence: str) -> web.Response:
        """Counts a request that is refused, and says why."""
        self.refused(outcome)
        return refusal(status, sentence)

    @web.middleware
    async def _serve_whole(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Calls the handler once all of the request is there."""
        client = request.protocol
        assert isinstance(client, Requests)
        answer = self._admit(request) or await self._read(request)
        if answer is not None and not request.content.is_eof():
            client.give_up()  # where the next request would begin is unknown
            answer.force_close()
            return answer
        client.take()
        try:
            return answer or await handler(request)
        except web.HTTPException as error:
            return refusal(error.status, f"{request.method} {request.path[:80]}: {error.reason}")
        finally:
            client.answer()

    async def _read(self, request: web.Request) -> web.Response | None:
        """The body is read and kept in the request; otherwise what refuses it."""
        if (request.content_length or 0) > self._max_body:
            return self.refuse("too_large", 413, f"a request may have {self._max_body} bytes")
        try:
            await request.read()
        except web.RequestPayloadError:
            return self.refuse("garbage", 400, "a body that is not as its head says")
        except OSError:  # it is counted where the connection was lost
            return refusal(400, "the connection broke before the request had arrived")
        return None


class Requests(web.RequestHandler):
    """HTTP of one client. A request is arriving, is being answered, or there is none."""

    __slots__ = ("_held", "_is_answering", "_is_over", "_port", "_served", "_since", "_unread")

    def __init__(self, port: Port, server: web.Server, transport: asyncio.Transport):
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, access_log=None, auto_decompress=False, lingering_time=LINGER_S)  # type: ignore[arg-type]
        self._port = port
        self._since = clock.monotonic()  # When the request that is arriving began, or the last one was answered.
        self._held = 0  # Bytes of a request that is not whole.
        self._unread = 0  # Bytes of answers, when some were read last.
        self._is_answering = self._served = False
        self._is_over = False  # Nothing that comes is looked at any more.
        self.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            super().data_received(data)
            return
        if not self._held and not self._is_answering:
            self._since = clock.monotonic()
        self._settle(self._held + len(data))
        if self._held > self._port.most_held:
            self._refuse("too_large", 413, f"a request may have {self._port.most_held} bytes")
        elif self._port.held > self._port.limits.held_bytes:
            self._refuse("busy", 503, "too much is arriving at once: try again")
        else:
            super().data_received(data)

    def connection_lost(self, error: BaseException | None) -> None:
        if self._held and not self._is_answering:
            self._port.refused("cut_off")
        self.give_up()
        super().connection_lost(error)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What was no request is refused, and its connection closed; one that fails never ends the others."""
        if status != 400:
            log.error("a request failed", exc_info=exc)
            if request.writer.output_size > 0:
                raise ConnectionError("half of the answer was sent")
            return refusal(500, "this request failed; see the log of the controller")
        self.give_up()
        answer = self._port.refuse("garbage", 400, "not a request of HTTP/1.1")
        answer.force_close()
        return answer

    def take(self) -> None:
        """The request is whole."""
        self._settle(0)
        self._is_answering = True

    def answer(self) -> None:
        """It is answered but for the sending."""
        self._since, self._is_answering, self._served, self._unread = clock.monotonic(), False, True, 0

    def give_up(self) -> None:
        self._settle(0)
        self._is_over = True

    def check(self, now: float) -> None:
        """Ends what takes too long."""
        if self._is_answering or self.transport is None:
            return
        unread = self.transport.get_write_buffer_size()
        if self._unread - unread >= READ_IN_IDLE:
            self._since, self._unread = now, unread
        self._unread = max(self._unread, unread)
        age_s = now - self._since - self._port.lag_s(self._since)
        if self._held:
            if age_s > self._port.deadline_s:
                self._refuse("too_slow", 408, f"a request has to arrive within {self._port.deadline_s:.0f} s")
        elif age_s > (IDLE_S if self._served else self._port.deadline_s):
            if unread:
                self.transport.abort()
            self.close()

    def close(self) -> None:
        """After the answer that is under way, if there is one."""
        super().close()
        if not self._is_answering:
            self.force_close()

    def _settle(self, held: int) -> None:
        self._port.held += held - self._held
        self._held = held

    def _refuse(self, outcome: str, status: int, sentence: str) -> None:
        """Answers in the place of the handler, and closes; while another answer is under way, closes only."""
        self.give_up()
        answer = self._port.refuse(outcome, status, sentence)
        if self.transport is not None and not self._is_answering:
            body = answer.body
            assert isinstance(body, bytes)
            head = f"HTTP/1.1 {status} {answer.reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            self.transport.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        self.force_close()
