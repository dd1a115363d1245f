"""An HTTP/1.1 request of our commands on a connection of its own, and its answer, within a deadline.

The standard library's client costs 6 MiB (it parses headers as e-mail, and loads TLS in any case) and bounds
every single read, not the whole answer: a server that sends a byte a second holds it for days.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from slurm_watchdog.base import clock

MAX_HEAD = 64 * 1024  # Of status line and headers; nginx and aiohttp allow 8 KiB a line.
STATUS = re.compile(rb"HTTP/1\.\d (\d{3})(?: ([^\r\n]*))?")
SIZE = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,16})[ \t]*(?:\r\n|$)", re.IGNORECASE)


class InvalidResponse(OSError):
    """What came back is no answer by RFC 9112, of a server that says how long it is, as ours do."""


@dataclass(frozen=True)
class Response:
    status: int
    reason: str
    body: bytes


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
    """The answer, cut off after `max_body` + 1 bytes. Raises OSError."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"Connection": "close", **headers}.items())
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    sock.sendall(head.encode() + body)
    inbox = bytearray()
    while (answer := _parsed(inbox, max_body)) is None:
        left_s = end - clock.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer did not come in time")
        sock.settimeout(left_s)
        data = sock.recv(1 << 16)
        if not data:
            raise InvalidResponse("the answer broke off" if inbox else "it closed without an answer")
        inbox += data
    return answer


def _parsed(inbox: bytearray, max_body: int) -> Response | None:
    """None: not all of it is there. Raises InvalidResponse."""
    at = inbox.find(b"\r\n\r\n", 0, MAX_HEAD)
    if at < 0:
        if len(inbox) > MAX_HEAD:
            raise InvalidResponse(f"its answer has more than {MAX_HEAD} bytes without an end of its headers")
        return None
    head = bytes(inbox[:at])
    status, size = STATUS.match(head), SIZE.search(head)
    if status is None or size is None:
        raise InvalidResponse(f"its answer is not HTTP, or says no length: {head[:80]!r}")
    end = at + 4 + min(int(size[1]), max_body + 1)
    if len(inbox) < end:
        return None
    return Response(int(status[1]), (status[2] or b"").decode(errors="replace"), bytes(inbox[at + 4 : end]))
