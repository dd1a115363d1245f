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
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from slurm_watchdog.base import clock
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.identity.transport import check_directory
from slurm_watchdog.wire.connection import Connection
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS, Limits
from slurm_watchdog.wire.stream_server import Stream, StreamDoor

log = logging.getLogger(__name__)

MAX_HEAD = 16 * 1024  # nginx and Apache allow 8 KiB a line, and so does aiohttp.
BACKLOG = 4096  # Connections that wait to be accepted: after a restart all come. The kernel takes somaxconn, if less.
DEADLINE_S = 20.0  # A request, or a frame, has to arrive whole within this time: a slow sender holds nothing open.
SWEEP_INTERVAL_S = 5.0  # Time between two sweeps over connections that are too slow or idle.
LAG_CHECK_S = 0.5  # Time between two measurements of this loop's own lag.
IDLE_S = 120.0  # A connection on which nothing has been asked for so long, or too little of an answer read, is closed.
READ_IN_IDLE = 1024 * 1024  # Bytes of a long answer that have to be read in that time: 9 kB/s.
LOG_INTERVAL_S = 60.0  # A refusal of the same kind is written to the log once in this time; the metric counts them all.
LINGER_S = 1.0  # What is left of a refused request is thrown away for so long, so that its answer is read.
END_S = 1.0  # For requests under way when the port is closed.

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
        self.only_uid, self.tls = only_uid, tls
        self.deadline_s = DEADLINE_S
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.held = 0  # Bytes of requests and frames that are not whole yet.
        self.late_s = 0.0  # How long this loop was busy with others, in all: time that no client can be blamed for.
        self.max_body, self.refused = max_body, refused
        self._admit, self._count, self._streams = admit, count, streams
        app.middlewares.append(self._serve_whole)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=END_S)
        self._logged_at: dict[str, float] = {}
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, backlog: int = BACKLOG) -> int:
        """Listens; returns the port. Raises OSError."""
        if self.only_uid is not None:
            raise ValueError("what is one user's is not served on a port")
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=backlog)
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
        self._server = await loop.create_unix_server(lambda: Connection(self), path, backlog=backlog)
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

    def serve(self, client: Connection, first: int) -> Stream | Requests:
        """What takes the bytes of a client from the `first` on."""
        if first == 0 and self._streams is not None:
            return Stream(client, self._streams)
        assert self._runner.server is not None
        return Requests(self, client, self._runner.server)

    def count_refused(self, reason: str, address: str, why: str = "") -> None:
        """Counts a connection that came to nothing."""
        now = clock.monotonic()
        self._count(reason)
        if not reason.startswith("too_many"):
            self.limits.failed(address, now)
        if now - self._logged_at.get(reason, float("-inf")) >= LOG_INTERVAL_S:
            self._logged_at[reason] = now
            said = f"{CONNECTION_REASONS[reason]} ({why})" if why else CONNECTION_REASONS[reason]
            log.warning("a connection from %s was refused: %s", address, said)

    def refresh(self) -> None:
        """Takes over certificates that were replaced. Clients of the previous authority have to reconnect."""
        if self.tls is not None and self.tls.refresh() and self.tls.new_authority:
            for connection in list(self.connections):
                connection.end()

    def now(self) -> float:
        """A clock that stands still while this loop is late: ten thousand handshakes at once, after a restart, would
        each be found too slow by another one, and retried without end."""
        return clock.monotonic() - self.late_s

    def record_lag(self, late_s: float) -> None:
        """Records that the loop came so many seconds late to its own check."""
        if late_s > LAG_CHECK_S:
            self.late_s += late_s

    async def _sweep(self) -> None:
        before = swept = clock.monotonic()
        while True:
            await asyncio.sleep(LAG_CHECK_S)
            now = clock.monotonic()
            self.record_lag(now - before - LAG_CHECK_S)
            before = now
            if now - swept >= SWEEP_INTERVAL_S:
                swept = now
                self.refresh()
                for connection in list(self.connections):
                    connection.check(self.now())

    # -- requests ----------------------------------------------------------------------------------------------

    def refuse(self, outcome: str, status: int, sentence: str) -> web.Response:
        """Counts a request that is refused, and says why."""
        self.refused(outcome)
        return refusal(status, sentence)

    @web.middleware
    async def _serve_whole(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Calls the handler once all of the request is there."""
        requests = request.protocol
        assert isinstance(requests, Requests)
        answer = self._admit(request) or await self._read(request)
        if answer is not None and not request.content.is_eof():
            requests.client.give_up()  # where the next request would begin is unknown
            answer.force_close()
            return answer
        requests.take()
        try:
            return answer or await handler(request)
        except web.HTTPException as error:
            return refusal(error.status, f"{request.method} {request.path[:80]}: {error.reason}")
        finally:
            requests.answer()

    async def _read(self, request: web.Request) -> web.Response | None:
        """The body is read and kept in the request; otherwise what refuses it."""
        if (request.content_length or 0) > self.max_body:
            return self.refuse("too_large", 413, f"a request may have {self.max_body} bytes")
        try:
            await request.read()
        except web.RequestPayloadError:
            return self.refuse("garbage", 400, "a body that is not as its head says")
        except OSError:  # it is counted where the connection was lost
            return refusal(400, "the connection broke before the request had arrived")
        return None


class Requests(web.RequestHandler):
    """HTTP of one client. A request is arriving, is being answered, or there is none."""

    __slots__ = ("_port", "_served", "_unread", "client", "is_busy", "most_held")

    def __init__(self, port: Port, client: Connection, server: web.Server):
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, access_log=None, auto_decompress=False, lingering_time=LINGER_S)  # type: ignore[arg-type]
        self._port, self.client = port, client
        self.most_held = MAX_HEAD + port.max_body
        self.is_busy = self._served = False  # Whether one is being answered; whether one was.
        self._unread = 0  # Bytes of answers, when some were read last.
        self.connection_made(client.transport)

    def connection_lost(self, error: BaseException | None) -> None:
        if self.client.held and not self.is_busy:
            self._port.refused("cut_off")
        self.client.give_up()
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
        self.client.give_up()
        answer = self._port.refuse("garbage", 400, "not a request of HTTP/1.1")
        answer.force_close()
        return answer

    def take(self) -> None:
        """The request is whole."""
        self.client.settle(0)
        self.is_busy = True

    def answer(self) -> None:
        """It is answered but for the sending."""
        self.client.since, self.is_busy, self._served, self._unread = self._port.now(), False, True, 0

    def refuse(self, outcome: str, why: str) -> None:
        """Closes it without an answer: whoever sends so does not read."""
        self._port.refused(outcome)
        self.client.give_up()
        self.force_close()

    def check(self, age_s: float) -> None:
        """Ends what is idle, and what does not read."""
        unread = self.client.transport.get_write_buffer_size()
        if self._unread - unread >= READ_IN_IDLE:
            self.client.since, self._unread = self.client.since + age_s, unread
        elif age_s > (IDLE_S if self._served else self._port.deadline_s):
            if unread:
                self.client.transport.abort()
            self.close()
        self._unread = max(self._unread, unread)

    def close(self) -> None:
        """After the answer that is under way, if there is one."""
        super().close()
        if not self.is_busy:
            self.force_close()
