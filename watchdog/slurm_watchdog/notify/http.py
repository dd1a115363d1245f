"""One POST of a JSON document, within a deadline, and what its answer means for the message; addresses and tokens from
their files. Neither is ever in a log or an exception: both are secrets."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.text import safe

DEADLINE_S = 10.0
"""For one message, or one request of up to 100 events. An outage of a receiver never delays an action."""
ANSWER_BYTES = 2000
"""Bytes of an answer that are read: it begins with the error."""
REFUSED_FOR_GOOD = frozenset({400, 413, 415, 422})
"""Statuses after which the same document is not sent again. Others (404, 401, 403) may come from a receiver
that is being set up."""


class SendFailed(Exception):
    """A message was not delivered. `permanent`: the same message will never be."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None, permanent: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s, self.permanent = reason, retry_after_s, permanent


async def post_json(
    url: str, document: Any, deadline_s: float, *, receiver: str, headers: Mapping[str, str] | None = None
) -> None:
    """Deliver `document` to `url`. Raises SendFailed."""
    try:
        async with (
            timeout(deadline_s),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=deadline_s)) as session,
            session.post(url, json=document, headers=dict(headers or {}), allow_redirects=False) as answer,
        ):
            if 200 <= answer.status < 300:
                return
            said = (await answer.content.read(ANSWER_BYTES)).decode(errors="replace")
            status, asked = answer.status, answer.headers
    except TimeoutError:
        raise SendFailed(f"{receiver} did not answer within {deadline_s:g} s") from None
    # `from None`: the exception below may hold the address.
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SendFailed(f"{receiver} can't be reached ({why(error)})") from None
    said = without_secrets(said, url)
    for word in " ".join((headers or {}).values()).split():
        said = said.replace(word, "(secret)")  # a receiver may echo the request
    raise SendFailed(
        f"{receiver} answered {status}: {safe(said, 200)}",
        retry_after_s=retry_after(asked) if status in (429, 503) else None,
        permanent=status in REFUSED_FOR_GOOD,
    )


def why(error: Exception) -> str:
    """What a connection, or a file with a secret, failed with: `Connection refused`, `its host name is not known`."""
    cause = getattr(error, "os_error", None) or error
    if isinstance(cause, ssl.SSLError) or isinstance(error, ssl.SSLError):
        return "its certificate is not trusted, or its TLS not understood"
    if isinstance(cause, socket.gaierror) or "DNS" in type(error).__name__:
        return "its host name is not known"
    if isinstance(cause, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return type(error).__name__


def read_secret(file: str, key: str) -> str:
    """The one line of a file. Raises SendFailed, without what is in it."""
    try:
        text = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
        raise SendFailed(f"{key} {file} can't be read ({why(error)})") from None
    if not text or not text.isprintable() or not text.isascii():
        raise SendFailed(f"{key} {file} does not hold one line of plain text")
    return text


def read_url(file: str, key: str) -> str:
    """An address from a file. Raises SendFailed, without naming the address."""
    try:
        url = Path(file).read_text().strip()
        parts = urlsplit(url)
    except (OSError, ValueError) as error:
        raise SendFailed(f"{key} {file} can't be read ({why(error)})") from None
    local = parts.scheme == "http" and parts.hostname in {"127.0.0.1", "localhost", "::1"}
    if not (parts.scheme == "https" and parts.hostname) and not local:
        raise SendFailed(f"{key} {file} holds no https:// address")
    return url


def without_secrets(text: str, url: str) -> str:
    """`text` without the secret address, or its path, in it."""
    for secret in (url, urlsplit(url).path, url.rstrip("/").rpartition("/")[2]):
        if len(secret) > 3:
            text = text.replace(secret, "(address)")
    return text


def retry_after(headers: Any) -> float | None:
    """Seconds of the Retry-After header; None if there is none that is a number."""
    value = next((str(value) for name, value in dict(headers).items() if name.lower() == "retry-after"), "")
    return float(value) if value.strip().isascii() and value.strip().isdecimal() else None
