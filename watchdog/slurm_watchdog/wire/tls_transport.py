"""TLS for the agents' port, between the socket and what reads requests: each refused handshake is seen, with
its reason, and bounded.

The event loop's own TLS does not report why a handshake failed. Here OpenSSL works on bytes in memory.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final, Protocol, cast

from slurm_watchdog.base import clock
from slurm_watchdog.identity.tls import reason_of
from slurm_watchdog.wire.rate_limits import Limits

HANDSHAKE_S = 10.0  # For a whole handshake: two round trips and some milliseconds of computing.
MAX_HANDSHAKE = 64 * 1024  # Bytes that a client may send for it; a chain of three certificates has about 4 KiB.
READ_BYTES = 16 * 1024  # OpenSSL gives out one record at a time, and that is the largest (RFC 8446, section 5.1).
CLOSE_DELAY_S = 1.0
SLICE_BYTES = 1024
"""Bytes that are decrypted at once. A buffer of OpenSSL's grows to a third more than this and stays so: of malloc's
bytes (mallinfo2(3), OpenSSL 3.0) a connection holds 36 KiB with 8 KiB, 28.4 with 2, 26.7 with 1, 26.1 with 0.5. A
report of 3 kB takes 16 us in place of 12, with 0.5 KiB 29."""
PEER_FIELDS = ("subject", "subjectAltName")  # What of a certificate is shown to the protocol inside, once.
KNOWN: Final[dict[str, Any]] = {}


class Port(Protocol):
    """What owns the connections: http_server.Server, which imports this module."""

    secured: set[TlsConnection]
    connections: set[Any]
    limits: Limits
    held: int
    max_body: int
    deadline_s: float

    def opened(self, address: str) -> bool: ...
    def closed(self, address: str) -> None: ...
    def count_refused(self, reason: str, address: str) -> None: ...
    def lag_s(self, since: float) -> float: ...


class TlsConnection(asyncio.Protocol):
    """One client. To `inner` it is the transport, once the client has proven who it is."""

    __slots__ = (
        "_closed", "_expires_at", "_incoming", "_inner", "_left", "_outgoing", "_port", "_remote", "_since",
        "_tls", "_transport",
        "peer",
    )  # fmt: skip

    def __init__(self, inner: asyncio.Protocol, context: ssl.SSLContext, port: Port):
        self._inner = inner
        self._port = port
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._transport: asyncio.Transport | None = None
        self._remote = ""
        self._since = clock.monotonic()
        self._left = MAX_HANDSHAKE
        self._closed = False
        self._expires_at = 0.0
        self.peer: dict[str, Any] | None = None
        """The client's certificate, as the ssl module gives it; None until the handshake is over, KNOWN once the
        protocol inside has read it."""

    # -- the socket's side -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._remote = peer[0] if peer else ""
        self._port.secured.add(self)
        if not self._port.opened(self._remote):
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._port.secured.discard(self)
        self._port.closed(self._remote)
        if self.peer is not None:
            self._inner.connection_lost(error)
        elif not self._closed and self._left < MAX_HANDSHAKE:
            self._port.count_refused("handshake", self._remote)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def data_received(self, data: bytes) -> None:
        # In slices: the buffer below never shrinks again, and there is one for each agent.
        for at in range(0, len(data), SLICE_BYTES):
            if not self._closed:
                self._decrypt(data[at : at + SLICE_BYTES])

    def _decrypt(self, data: bytes) -> None:
        self._incoming.write(data)
        if self.peer is None:
            self._left -= len(data)
            if not self._shake_hands():
                return
        try:
            while not self._closed:
                chunk = self._tls.read(READ_BYTES)
                if not chunk:
                    self.close()
                    return
                self._inner.data_received(chunk)
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLZeroReturnError:
            self.close()
        except ssl.SSLError:
            self.abort()

    def _shake_hands(self) -> bool:
        """Whether the client has shown by now who it is."""
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
        self.peer = {name: shown[name] for name in PEER_FIELDS if name in shown}
        self._inner.connection_made(cast("asyncio.Transport", self))
        self.peer = KNOWN  # the names are kept there; a certificate takes 1 KiB
        return True

    def _give_up(self, reason: str) -> None:
        """Refuses the client after a moment: unread bytes would reset the connection before it read the alert."""
        self._closed = True
        self._port.count_refused(reason, self._remote)
        transport = self._transport
        if transport is not None:
            if transport.can_write_eof():
                transport.write_eof()
            asyncio.get_running_loop().call_later(CLOSE_DELAY_S, transport.close)

    def check(self, now: float) -> None:
        """Ends a handshake that takes too long, and a connection whose certificate has expired meanwhile."""
        if self.peer is None:
            if now - self._since - self._port.lag_s(self._since) > HANDSHAKE_S and not self._closed:
                self._give_up("slow_handshake")
            return
        if self._expires_at < clock.wall():
            self._give_up("expired")

    # -- a transport, for what is within -----------------------------------------------------------------------

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

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self._inner = protocol

    def set_write_buffer_limits(self, high: int) -> None:
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=high)

    def get_extra_info(self, name: str) -> Any:
        if name == "peercert":
            return self.peer
        return None if self._transport is None else self._transport.get_extra_info(name)

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing.pending:
            self._transport.write(self._outgoing.read())
