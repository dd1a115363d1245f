"""One port of the controller: HTTP for people and programs, by aiohttp, and streams of agents, which begin with a byte
that no request begins with.

What it may take is bounded: connections in all and of each address, requests and frames, the time for them, the bytes
of all that has not arrived whole, the answers that a client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.identity.transport import check_directory
from slurm_watchdog.wire.connection import Connection
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS, Limits
from slurm_watchdog.wire.stream_server import Stream, StreamDoor

log = logging.getLogger(__name__)

MAX_HEAD = 512 * 1024  # Bytes before a handler is called: of a head, which aiohttp bounds, and what comes with it.
BACKLOG = 4096  # Connections that wait to be accepted: after a restart all come. The kernel takes somaxconn, if less.
DEADLINE_S = 20.0  # A request, or a frame, has to arrive whole within this time: a slow sender holds nothing open.
SWEEP_INTERVAL_S = 5.0  # Time between two sweeps over connections that are too slow or idle.
TURN_S = 0.02  # So long frames are taken without a break.
LAG_CHECK_S = 0.5  # Time between two measurements of this loop's own lag.
IDLE_S = 120.0  # A connection on which nothing has been asked for so long, or an answer not been read, is closed.
LOG_INTERVAL_S = 60.0  # A refusal of the same kind is written to the log once in this time; the metric counts them all.
LINGER_S = 1.0  # What is left of a refused request is thrown away for so long, so that its answer is read.
END_S = 1.0  # For requests under way when the port is closed.

Admission = Callable[[web.Request], web.Response | None]  # What refuses a request before its body.


def refusal(status: int, sentence: str) -> web.Response:
    """Why it is refused, as JSON."""
    return web.json_response({"error": sentence}, status=status)


class Port:
    """All connections of one port, or of one unix socket. One event loop owns it."""

    def __init__(
        self,
        app: web.Application,
        *,
        admit: Admission = lambda request: None,
        count: Callable[[str], None] = lambda reason: None,
        limits: Limits | None = None,
        tls: Context | None = None,
        only_uid: int | None = None,
        streams: StreamDoor | None = None,
    ):
        """`app` answers HTTP; its client_max_size bounds bodies. `admit` refuses requests before theirs, `count` is
        called with the reason of each refused connection. With `tls` clients have to show a certificate; with
        `only_uid` it listens on a unix socket, and no process of another user gets a connection. `streams`: what takes
        the frames of agents; None where none come."""
        self.only_uid, self.tls = only_uid, tls
        self.deadline_s = DEADLINE_S
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.held = 0  # Bytes of requests and frames that are not whole yet.
        self.late_s = 0.0  # How long this loop was busy with others, in all: time that no client can be blamed for.
        self._admit, self._count, self._streams = admit, count, streams
        app.middlewares.append(self._serve_whole)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=END_S)
        self._waiting: deque[Stream] = deque()  # With what has arrived: served in turns.
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
        return Requests(client, self._runner.server)

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

    @web.middleware
    async def _serve_whole(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Calls the handler once all of the request is there."""
        requests = request.protocol
        assert isinstance(requests, Requests)
        requests.begin()
        try:
            if (refused := self._admit(request)) is not None:
                return refused
            size, most = request.content_length or 0, request.client_max_size
            if size > most:
                raise web.HTTPRequestEntityTooLarge(most, size)
            await wait_for(request.read(), self.deadline_s)
            return await handler(request)
        except TimeoutError:
            return refusal(408, f"a request has to arrive within {self.deadline_s:.0f} s")
        except web.RequestPayloadError:
            return refusal(400, "a body that is not as its head says")
        except web.HTTPException as error:
            return refusal(error.status, f"{request.method} {request.path[:80]}: {error.reason}")
        except Exception:  # the boundary: one request that fails never ends the others
            log.exception("a request failed")
            return refusal(500, "this request failed; see the log of the controller")
        finally:
            requests.end()


class Requests(web.RequestHandler):
    """HTTP of one client, by aiohttp. The head of a request is arriving, it is being answered, or there is none."""

    __slots__ = ("_client", "_served", "is_busy")

    most_held = MAX_HEAD

    def __init__(self, client: Connection, server: web.Server):
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, access_log=None, auto_decompress=False, lingering_time=LINGER_S)  # type: ignore[arg-type]
        self._client = client
        self.is_busy = self._served = False  # Whether one is being answered; whether one was.
        self.connection_made(client.transport)

    def begin(self) -> None:
        """Its head is whole; its body is bounded by the application."""
        self._client.settle(0)
        self.is_busy = True

    def end(self) -> None:
        """It is answered but for the sending."""
        self._client.settle(0)
        self._client.since, self.is_busy, self._served = self._client.port.now(), False, True

    def refuse(self, outcome: str, why: str) -> None:
        """Closes it without an answer: such a client does not read."""
        self._client.give_up()
        self.force_close()

    def check(self, age_s: float) -> None:
        """Ends what is idle, and what does not read its answer."""
        if age_s > (IDLE_S if self._served else self._client.port.deadline_s):
            self._client.transport.abort()

    def close(self) -> None:
        """After the answer that is under way, if there is one."""
        super().close()
        if not self.is_busy:
            self.force_close()
