"""One connection to the controller: an HTTP/1.1 request and its answer, each within a deadline, redirects not followed.

The standard library's client costs 6 MiB (it parses headers as e-mail, and loads TLS in any case) and bounds
every single read, not the whole answer: a server that sends a byte a second holds it for days. Here TLS is
loaded for https only.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slurm_watchdog.base import clock
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles

if TYPE_CHECKING:
    import ssl

    from slurm_watchdog.identity.tls import Context

MAX_HEAD = 64 * 1024  # Of status line and headers; nginx and aiohttp allow 8 KiB a line.
PORTS = {"http": 80, "https": 443}


FILE_CHECK_S = 60.0  # Time between two checks whether our certificate was renewed.


class AuthenticationFailed(OSError):
    """We can't show who we are, or the peer has not shown to be the controller. The text says why, and what to do."""


class NotKept(ConnectionError):
    """The connection on which the peer had proven itself is closed: nothing was answered, and the listener
    there now has not authenticated."""


class InvalidResponse(OSError):
    """What came back is no answer by RFC 9112."""


@dataclass(frozen=True)
class Response:
    status: int
    reason: str
    headers: dict[bytes, bytes]  # Names in lower case; of one that came twice the last.
    body: bytes


def connect_tcp(address: tuple[bytes, int], timeout: float) -> socket.socket:
    """Raises OSError."""
    # As bytes: see _open. The library takes them, its annotations do not say so.
    sock = socket.create_connection(address, timeout=timeout)  # type: ignore[arg-type]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def ask_once(
    sock: socket.socket,
    method: str,
    host: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    max_body: int,
    end: float,
) -> Response:
    """One request on a connection of its own, and the answer, cut off after `max_body` + 1 bytes. Raises OSError."""
    sock.sendall(_message(method, host, path, body, {"Connection": "close", **headers}))
    return _read_response(_Reader(sock, end, clock.monotonic), max_body)[0]


def _message(method: str, host: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return head.encode() + body


class Connection:
    """A connection that is kept as long as the server keeps it. Not for two threads.

    Without `files` it knows nothing about who is at the other end: see slurm_watchdog.agent.delivery.channel.
    """

    def __init__(
        self,
        url: str,
        max_body: int,
        connect: Callable[..., socket.socket] = connect_tcp,
        now: Callable[[], float] = clock.monotonic,
        files: TlsFiles | None = None,
    ):
        """To the server of `url`; answers are cut off after `max_body` + 1 bytes. No traffic yet.

        With `files` it shows its certificate, and sends nothing to a server whose certificate their authority
        did not sign. Without them it does not use TLS.
        """
        address = urlsplit(url)
        self._https = address.scheme == "https"
        self._host = address.hostname or ""
        self._port = address.port or PORTS[address.scheme]
        self._name = address.netloc.rpartition("@")[2]
        self._max_body = max_body
        self._connect = connect
        self._now = now
        self._sock: socket.socket | None = None
        self._files = files
        self._ours: Context | None = None
        self._files_checked_at = now()

    def post(self, path: str, body: bytes, headers: dict[str, str], connect_s: float, answer_s: float) -> Response:
        """Sends `body` and returns the answer. Raises OSError, InvalidResponse among them; then there is no
        connection any more.

        `connect_s` bounds the connecting, name look-up apart, and `answer_s` all the rest.
        """
        message = _message("POST", self._name, path, body, headers)
        self._renew()
        kept = self._sock is not None
        try:
            try:
                return self._exchange(message, connect_s, answer_s)
            except _Closed:
                if not kept:
                    raise
                self.close()  # the server had closed it between two reports, as servers do
                return self._exchange(message, connect_s, answer_s)
        except BaseException:
            self.close()
            raise

    def post_kept(self, path: str, body: bytes, headers: dict[str, str], answer_s: float) -> Response:
        """As `post`, on the connection that is open and on no other. Raises NotKept if there is none any more."""
        if self._sock is None:
            raise NotKept("the connection to the controller is closed")
        try:
            return self._exchange(_message("POST", self._name, path, body, headers), 0.0, answer_s)
        except _Closed as error:
            self.close()
            raise NotKept(str(error)) from error
        except BaseException:
            self.close()
            raise

    def certificates(self) -> dict[str, float]:
        """`own` and `authority` -> when that certificate ends, in seconds since the epoch; empty without
        certificates, or before they were used."""
        return {} if self._ours is None else self._ours.expires

    def recheck_files(self) -> None:
        """A certificate that was renewed is used from the next report on. For any thread."""
        self._files_checked_at = float("-inf")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def _exchange(self, message: bytes, connect_s: float, answer_s: float) -> Response:
        sock = self._sock = self._sock or self._open(connect_s)
        end = self._now() + answer_s
        sock.settimeout(answer_s)
        try:
            sock.sendall(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _Closed(f"the connection was closed: {error}") from error
        reader = _Reader(sock, end, self._now)
        response, keep = _read_response(reader, self._max_body)
        if not keep or reader.inbox:
            self.close()
        return response

    def _open(self, connect_s: float) -> socket.socket:
        # As bytes: a str would be put through IDNA, whose tables take a megabyte.
        sock = self._connect((self._host.encode("ascii"), self._port), timeout=connect_s)
        if not self._https and self._files is None:
            return sock
        try:
            wrapped: socket.socket = self._tls().wrap_socket(sock, server_hostname=self._host)
        except BaseException:
            sock.close()
            raise
        return wrapped

    def _tls(self) -> ssl.SSLContext:
        """Raises AuthenticationFailed if our own files cannot be used."""
        if self._files is None:
            raise AuthenticationFailed("controller begins with https://, and expert.security.mode is not tls")
        if not self._https:
            raise AuthenticationFailed(
                "controller has to begin with https:// where nodes prove themselves by certificates"
            )
        from slurm_watchdog.identity.tls import Context

        try:
            if self._ours is None:
                self._ours = Context(self._files, server=False)
            else:
                self._ours.refresh()
        except IdentityError as error:
            raise AuthenticationFailed(str(error)) from error
        return self._ours.current

    def _renew(self) -> None:
        """Every minute, or when `recheck_files` asked for it."""
        now = self._now()
        if self._ours is None or now - self._files_checked_at < FILE_CHECK_S:
            return
        self._files_checked_at = now
        if self._ours.refresh():
            self.close()


class _Closed(ConnectionError):
    """The server closed the connection without an answer."""


class _Reader:
    """Bytes of a socket until a deadline."""

    def __init__(self, sock: socket.socket, end: float, now: Callable[[], float]):
        self._sock, self._end, self._now = sock, end, now
        self.inbox = bytearray()

    def more(self) -> bool:
        """Waits for more; False at the end of the stream. Raises TimeoutError."""
        left_s = self._end - self._now()
        if left_s <= 0:
            raise TimeoutError("the answer did not come in time")
        self._sock.settimeout(left_s)
        try:
            data = self._sock.recv(1 << 16)
        except ConnectionResetError as error:
            if not self.inbox:
                raise _Closed(f"the connection was closed: {error}") from error
            raise
        self.inbox += data
        return bool(data)

    def until(self, mark: bytes, limit: int) -> bytes:
        """Everything before `mark`, which is taken, too. Raises InvalidResponse if that is more than `limit` bytes."""
        while (at := self.inbox.find(mark)) < 0:
            if len(self.inbox) > limit:
                raise InvalidResponse(f"its answer has more than {limit} bytes without an end of its headers")
            if not self.more():
                raise (InvalidResponse("the answer broke off") if self.inbox else _Closed("closed without an answer"))
        found = bytes(self.inbox[:at])
        del self.inbox[: at + len(mark)]
        return found

    def exactly(self, size: int) -> bytes:
        """`size` bytes. Raises InvalidResponse if the stream ends before."""
        while len(self.inbox) < size:
            if not self.more():
                raise InvalidResponse("the answer broke off")
        found = bytes(self.inbox[:size])
        del self.inbox[:size]
        return found


def _read_response(reader: _Reader, max_body: int) -> tuple[Response, bool]:
    """The answer, and whether the connection may be used again."""
    version, status, reason, headers = parse_head(reader.until(b"\r\n\r\n", MAX_HEAD))
    while 100 <= status < 200:  # 100 Continue and the like: the answer is still to come
        version, status, reason, headers = parse_head(reader.until(b"\r\n\r\n", MAX_HEAD))
    keep = version == b"HTTP/1.1" and headers.get(b"connection", b"").lower() != b"close"
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        body = _read_chunks(reader, max_body)
        keep = keep and len(body) <= max_body
    elif b"content-length" in headers:
        size = parse_size(headers[b"content-length"], 10)
        keep = keep and size <= max_body
        body = reader.exactly(min(size, max_body + 1))
    elif status in (204, 304):
        body = b""
    else:
        keep = False
        while len(reader.inbox) <= max_body and reader.more():
            pass
        body = bytes(reader.inbox[: max_body + 1])
    return Response(status, reason, headers, body), keep


def _read_chunks(reader: _Reader, max_body: int) -> bytes:
    body = bytearray()
    while len(body) <= max_body:
        size = parse_size(reader.until(b"\r\n", MAX_HEAD).partition(b";")[0], 16)
        if size == 0:
            while reader.until(b"\r\n", MAX_HEAD):
                pass  # trailers
            return bytes(body)
        body += reader.exactly(min(size, max_body + 1 - len(body)))
        if len(body) <= max_body:
            reader.exactly(2)
    return bytes(body)


def parse_head(head: bytes) -> tuple[bytes, int, str, dict[bytes, bytes]]:
    """Version, status, reason and headers of an answer's first lines. Raises InvalidResponse."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code, _, reason = rest.partition(b" ")
    if not version.startswith(b"HTTP/1.") or len(code) != 3 or not code.isdigit():
        raise InvalidResponse(f"its answer is not HTTP: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return version, int(code), reason.decode(errors="replace"), headers


def parse_size(text: bytes, base: int) -> int:
    """A length, decimal or hexadecimal. Raises InvalidResponse for anything else, signs and underscores included."""
    text = text.strip()
    digits = b"0123456789abcdefABCDEF"[: 10 if base == 10 else 22]
    if not text or len(text) > 16 or text.strip(digits):
        raise InvalidResponse(f"its answer has no proper length: {text[:40]!r}")
    return int(text, base)
