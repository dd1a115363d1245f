"""Requests, answers and the head of a request of HTTP/1.1 (RFC 9112). Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

MAX_ERROR = 2000  # Characters of a sentence that a controller answers.
MAX_HEAD = 16 * 1024  # nginx and Apache allow 8 KiB a line.


@dataclass(frozen=True, slots=True)
class Request:
    """One request, whole."""

    method: str
    path: str
    authorization: str
    body: bytes
    remote: str
    target: str = ""  # The path with its query.


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    status: int = 200
    content_type: bytes = b"application/json"


def refusal(status: int, sentence: str) -> Answer:
    """Why it is refused, as JSON."""
    return Answer(msgspec.json.encode({"error": sentence}), status)


def error_text(body: bytes, key: str) -> str:
    """One text of such a document: its sentence, or its word for programs."""
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return ""
    return str(document.get(key) or "")[:MAX_ERROR] if isinstance(document, dict) else ""


Handler = Callable[[Request], "Answer | Awaitable[Answer]"]  # Answers at once, or after another answer. Raises nothing.
Admission = Callable[["Head", str], "Answer | None"]  # (head, address): what refuses a request before its body.
Refusal = Callable[[str, int, str], Answer]  # (outcome, status, sentence): counts a request that never became one.


class BadRequest(Exception):
    """What is no request; its arguments are (outcome, status, sentence)."""


class Refused(Exception):
    """A request that is refused before its body."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


@dataclass(slots=True)
class Head:
    """What the first lines of a request say."""

    method: str
    path: str
    keep: bool
    authorization: str = ""
    size: int = 0
    target: str = ""  # The path with its query.


def parse_head(data: bytes) -> Head:
    """The lines before the empty one. Raises BadRequest."""
    first, *lines = data.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        raise BadRequest("garbage", 400, "not a request of HTTP/1.1")
    target = words[1].decode("ascii", "replace")
    head = Head(words[0].decode("ascii", "replace"), target.partition("?")[0], words[2] != b"HTTP/1.0", target=target)
    sizes = set()
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise BadRequest("garbage", 400, "a line of the head is not a header")
        match name.lower():
            case b"content-length":
                sizes.add(value.strip())
            case b"authorization":
                head.authorization = value.strip().decode("latin-1")
            case b"connection":
                head.keep = head.keep and b"close" not in value.lower()
            case b"transfer-encoding":
                raise BadRequest("garbage", 411, "a report has to come with its Content-Length")
            case b"content-encoding":
                raise BadRequest("garbage", 415, "a report comes as it is, not compressed")
    if sizes:
        head.size = parse_size(sizes)
    return head


def parse_size(sizes: set[bytes]) -> int:
    """A Content-Length; of several headers all have to say the same. Raises BadRequest."""
    if len(sizes) != 1:
        raise BadRequest("garbage", 400, "two lengths for one body")
    (text,) = sizes
    if not text.isdigit() or len(text) > 12:
        raise BadRequest("garbage", 400, "the Content-Length is not a number")
    return int(text)
