"""One client of a port, from its first byte to its last: a stream of an agent, or HTTP, with TLS or without.

The event loop's own TLS does not do for agents: `start_tls` says why a handshake failed, but sends no alert, so that
an agent would not learn that its certificate has expired; and its buffers take 256 KiB of address space a connection.
Here OpenSSL works on bytes in memory.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

from slurm_watchdog.base import clock
from slurm_watchdog.identity.tls import reason_of
from slurm_watchdog.identity.transport import peer_of
from slurm_watchdog.wire.stream_server import Bounds

HANDSHAKE_S = 10.0  # For a whole handshake: two round trips and some milliseconds of computing.
MAX_HANDSHAKE = 64 * 1024  # Bytes that a client may send for it; a chain of three certificates has about 4 KiB.
READ_BYTES = 16 * 1024  # OpenSSL gives out one record at a time, and that is the largest (RFC 8446, section 5.1).
CLOSE_DELAY_S = 1.0
SLICE_BYTES = 1024
"""Bytes that are decrypted at once. A buffer of OpenSSL's grows to a third more than this and stays so: of malloc's
bytes (mallinfo2(3), OpenSSL 3.0) a connection holds 36 KiB with 8 KiB, 28.4 with 2, 26.7 with 1, 26.1 with 0.5. A
report of 3 kB takes 16 us in place of 12, with 0.5 KiB 29."""


class Port(Bounds, Protocol):
    """What owns the connections: port.Port."""

    connections: set[Connection]

    def opened(self, address: str) -> bool: ...
    def closed(self, address: str) -> None: ...
    def is_own(self, transport: asyncio.Transport) -> bool: ...
    def count_refused(self, reason: str, address: str) -> None: ...
    def names_of(self, certificate: Mapping[str, Any]) -> frozenset[str]: ...
    def serve(self, first: int, transport: asyncio.Transport, client: Connection) -> Any: ...


class Connection(asyncio.Protocol):
    """One client. Its first byte decides what it speaks."""

    __slots__ = ("_inner", "_port", "_since", "_transport", "names", "remote")

    def __init__(self, port: Port):
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._inner: Any = None  # A Stream, or Requests.
        self._since = clock.monotonic()
        self.names: frozenset[str] | None = None  # The nodes that its certificate is for; None without one.
        self.remote = ""  # Its address, or on a unix socket its user.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's own is one by its methods only
        self._transport = transport
        transport.set_write_buffer_limits(high=self._port.limits.unread_bytes)
        peer = transport.get_extra_info("peername")
        self.remote = peer[0] if peer else f"user {peer_of(transport.get_extra_info('socket'))[1]}"
        self._port.connections.add(self)
        if not self._port.opened(self.remote) or not self._port.is_own(transport):
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._port.connections.discard(self)
        self._port.closed(self.remote)
        if self._inner is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._take(data, self._transport)

    def _take(self, data: bytes, transport: Any) -> None:
        if self._inner is None:
            self._inner = self._port.serve(data[0], transport, self)
        self._inner.data_received(data)

    def check(self, now: float) -> None:
        """Ends what takes too long."""
        if self._inner is not None:
            self._inner.check(now)
        elif now - self._since - self._port.lag_s(self._since) > self._port.deadline_s:
            self.end()

    def end(self) -> None:
        """Closes it, for the port."""
        if self._inner is not None:
            self._inner.close()
        elif self._transport is not None:
            self._transport.close()


class TlsConnection(Connection):
    """One client with TLS. To what it speaks it is the transport, once the client has proven who it is."""

    __slots__ = ("_closed", "_expires_at", "_incoming", "_left", "_outgoing", "_tls")

    def __init__(self, port: Port, context: ssl.SSLContext):
        super().__init__(port)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._left = MAX_HANDSHAKE
        self._closed = False
        self._expires_at = 0.0

    def connection_lost(self, error: Exception | None) -> None:
        if self.names is None and not self._closed and self._left < MAX_HANDSHAKE:
            self._port.count_refused("handshake", self.remote)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        # In slices: the buffer below never shrinks again, and there is one for each agent.
        for at in range(0, len(data), SLICE_BYTES):
            if not self._closed:
                self._decrypt(data[at : at + SLICE_BYTES])

    def _decrypt(self, data: bytes) -> None:
        self._incoming.write(data)
        if self.names is None and not self._shake_hands(len(data)):
            return
        try:
            while not self._closed:
                chunk = self._tls.read(READ_BYTES)
                if not chunk:
                    self.close()
                    return
                self._take(chunk, self)
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLZeroReturnError:
            self.close()
        except ssl.SSLError:
            self.abort()

    def _shake_hands(self, size: int) -> bool:
        """Whether the client has shown by now who it is."""
        self._left -= size
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            if self._left < 0:
                self._give_up("handshake")
            return False
        except ssl.SSLError as error:
            self._flush()  # with the alert that says why
            self._give_up(reason_of(error))
            return False
        self._flush()
        shown = cast("dict[str, Any]", self._tls.getpeercert() or {})
        try:
            self._expires_at = ssl.cert_time_to_seconds(shown["notAfter"])
        except (KeyError, ValueError):
            self._give_up("bad_certificate")
            return False
        self._since, self.names = clock.monotonic(), self._port.names_of(shown)
        return True

    def _give_up(self, reason: str) -> None:
        """Refuses the client after a moment: unread bytes would reset the connection before it read the alert."""
        self._closed = True
        self._port.count_refused(reason, self.remote)
        transport = self._transport
        if transport is not None:
            if transport.can_write_eof():
                transport.write_eof()
            asyncio.get_running_loop().call_later(CLOSE_DELAY_S, transport.close)

    def check(self, now: float) -> None:
        if self._closed:
            return
        if self.names is None:
            if now - self._since - self._port.lag_s(self._since) > HANDSHAKE_S:
                self._give_up("slow_handshake")
        elif self._expires_at < clock.wall():
            self._give_up("expired")
        else:
            super().check(now)

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    # -- a transport, for what it speaks -----------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._closed:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[self._tls.write(view) :]
        except ssl.SSLError:
            self.abort()
        self._flush()

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        """Sends close_notify, and closes once all has been sent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # the other end need not answer the goodbye
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    def is_closing(self) -> bool:
        return self._closed

    def __getattr__(self, name: str) -> Any:
        """All else is the socket's: whether it is read, what is known of it."""
        return getattr(self._transport, name)
