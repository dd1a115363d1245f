"""One request of a command to a controller by HTTP/1.1, within a deadline.

The standard library's client costs 6 MiB, and bounds every single read, not the whole answer: a server that sends a
byte a second holds it for days.
"""

from __future__ import annotations

import re
import socket

import msgspec

from slurm_watchdog.base import clock

MAX_HEAD = 64 * 1024  # Of status line and headers of an answer; aiohttp allows 8 KiB a line.
MAX_ERROR = 2000  # Characters of a sentence that a controller answers.
STATUS = re.compile(rb"HTTP/1\.\d (\d{3})(?: ([^\r\n]*))?")
SIZE = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,16})[ \t]*(?:\r\n|$)", re.IGNORECASE)


def ask_once(
    sock: socket.socket, method: str, host: str, target: str, body: bytes, headers: str, most: int, end: float
) -> tuple[int, str, bytes]:
    """(status, its words, body) of one request by HTTP/1.1 on a connection of its own, by `end`; the body is cut off
    after `most` + 1 bytes. Raises OSError."""
    headers = f"Host: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}"
    head = f"{method} {target} HTTP/1.1\r\n{headers}\r\n"
    sock.sendall(head.encode() + body)
    inbox = bytearray()
    while len(inbox) <= MAX_HEAD + most:
        if (left_s := end - clock.monotonic()) <= 0:
            raise TimeoutError("the answer did not come in time")
        sock.settimeout(left_s)
        if not (data := sock.recv(1 << 16)):
            break
        inbox += data
    found, _, answer = bytes(inbox).partition(b"\r\n\r\n")
    status, size = STATUS.match(found), SIZE.search(found)
    if not inbox or status is None or size is None:
        raise OSError(
            f"its answer is not HTTP, or has no length: {found[:80]!r}" if inbox else "it closed without an answer"
        )
    if len(answer) < min(int(size[1]), most + 1):
        raise OSError("the answer broke off")
    return int(status[1]), (status[2] or b"").decode(errors="replace"), answer[: most + 1]


def error_text(body: bytes, key: str) -> str:
    """One text of the document of an error: its sentence, or its word for programs."""
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return ""
    return str(document.get(key) or "")[:MAX_ERROR] if isinstance(document, dict) else ""
