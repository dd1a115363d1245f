"""One client of a port, from its first byte to its last, with TLS or without, and what of it is bounded."""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import Any, Protocol, cast

from slurm_watchdog.base import clock
from slurm_watchdog.identity.tls import Context, names_of, reason_of
from slurm_watchdog.identity.transport import peer_of
from slurm_watchdog.wire.rate_limits import Limits

HANDSHAKE_S = 10.0  # For a whole handshake: two round trips and some milliseconds of computing.
TLS_TIMES: dict[str, float] = {"ssl_shutdown_timeout": 1.0} if sys.version_info >= (3, 11) else {}
"""The other end need not answer the goodbye. A handshake is ended by `check`, which knows of the loop's own lag."""


class Port(Protocol):
    """What owns the connections: port.Port."""

    connections: set[Connection]
    limits: Limits
    held: int
    deadline_s: float
    only_uid: int | None
    tls: Context | None

    def now(self) -> float: ...
    def count_refused(self, reason: str, address: str, why: str = "") -> None: ...
    def serve(self, client: Connection, first: int) -> Any: ...
    def serve_soon(self, stream: Any) -> None: ...


class Connection(asyncio.Protocol):
    """One client. Its first byte decides what it speaks; the first after the handshake, where there is one."""

    __slots__ = ("_early", "_expires_at", "_inner", "held", "is_over", "names", "port", "remote", "since", "transport")

    def __init__(self, port: Port):
        self.port = port
        self.transport: Any = None
        self.since = port.now()  # When what is arriving began, or the last of it was taken.
        self.held = 0  # Bytes of what has not arrived whole.
        self.is_over = False  # Nothing that comes is counted any more.
        self.names: frozenset[str] | None = None  # The nodes that its certificate is for; None without one.
        self.remote = ""  # Its address, or on a unix socket its user.
        self._early: bytes | None = None  # What came before the end of the handshake was seen; None: there is none.
        self._expires_at = float("inf")
        self._inner: Any = None  # A Stream, or Requests.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        port, self.transport = self.port, cast("Any", transport)
        self.transport.set_write_buffer_limits(high=port.limits.unread_bytes)
        peer = transport.get_extra_info("peername")
        uid = None if peer else peer_of(transport.get_extra_info("socket"))[1]
        self.remote = peer[0] if peer else f"user {uid}"
        port.connections.add(self)
        reason = port.limits.opened(self.remote, clock.monotonic())
        if not reason and port.only_uid not in (None, uid):
            reason = "another_user"
        if reason:
            self.refuse(reason)
        elif port.tls is not None:
            self._early = b""
            asyncio.ensure_future(self._shake_hands(port.tls))  # noqa: RUF006 - the transport's waiter holds it

    async def _shake_hands(self, tls: Context) -> None:
        loop = asyncio.get_running_loop()
        if self.transport.is_closing():
            return
        try:
            handshake = loop.start_tls(self.transport, self, tls.current, server_side=True, **TLS_TIMES)  # type: ignore[arg-type]
            coming = asyncio.ensure_future(handshake)
            await asyncio.sleep(0)  # it has taken the socket over; what uvloop has read before is its own
            if self._early and not self.transport.is_closing():
                loop.call_soon(_feed, self.transport.get_protocol(), self._early)
                self._early = b""
            secure = await coming
        except ssl.SSLError as error:
            self.refuse(*reason_of(error))
        except OSError:  # it has hung up: that costs us a handshake as well
            self.port.limits.failed(self.remote, clock.monotonic())
            self.connection_lost(None)
        else:
            shown = cast("dict[str, Any]", secure and secure.get_extra_info("peercert"))
            if not shown or self not in self.port.connections:
                self.connection_lost(None)
                return
            self.transport, self.since = secure, self.port.now()
            self.transport.set_write_buffer_limits(high=self.port.limits.unread_bytes)
            self._expires_at, self.names = ssl.cert_time_to_seconds(shown["notAfter"]), names_of(shown, tls.domain)
            early, self._early = self._early, None
            if early:
                self.data_received(early)

    def refuse(self, reason: str, why: str = "") -> None:
        """Ends it for what it has shown."""
        self.port.count_refused(reason, self.remote, why)
        self.transport.abort()
        self.connection_lost(None)  # which it is not told of by a handshake that does not end

    def connection_lost(self, error: Exception | None) -> None:
        if self in self.port.connections:
            self.port.connections.discard(self)
            self.port.limits.closed(self.remote)
            if self._inner is not None:
                self._inner.connection_lost(error)
            self.give_up()
            self._inner = None  # it knows us

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            return
        if self._inner is None:
            if self.is_over:
                return
            self._inner = self.port.serve(self, data[0])
        inner = self._inner
        if not self.is_over:
            if not self.held and not inner.is_busy:
                self.since = self.port.now()
            self.settle(self.held + len(data))
            if self.held > inner.most_held:
                inner.refuse("too_large", "too much at once")
            elif self.port.held > self.port.limits.held_bytes:
                inner.refuse("busy", "too much is arriving at once: try again")
        inner.data_received(data)

    def settle(self, held: int) -> None:
        """So many of its bytes are not whole."""
        self.port.held += held - self.held
        self.held = held

    def give_up(self) -> None:
        """What comes from now on is thrown away."""
        self.settle(0)
        self.is_over = True

    def check(self, now: float) -> None:
        """Ends what takes too long; `now` by the port's clock."""
        age_s = now - self.since
        if self._early is not None:
            if age_s > HANDSHAKE_S:
                self.refuse("slow_handshake")
        elif self._expires_at < clock.wall():
            self.refuse("expired")
        elif self._inner is None:
            if age_s > self.port.deadline_s:
                self.transport.close()
        elif not self._inner.is_busy:
            if self.held and age_s > self.port.deadline_s:
                self._inner.refuse("too_slow", f"it has to arrive whole within {self.port.deadline_s:.0f} s")
            else:
                self._inner.check(age_s)

    def end(self) -> None:
        """Closes it, for the port."""
        (self.transport if self._inner is None else self._inner).close()


def _feed(tls: Any, data: bytes) -> None:
    """Gives the protocol of a handshake what had come before it."""
    while data:
        buffer = tls.get_buffer(len(data))
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        tls.buffer_updated(size)
        data = data[size:]
