"""One POST of a JSON document, within a deadline, and what its answer means for the message; addresses and tokens from
their files. Neither is ever in a log or an exception: both are secrets."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.text import safe
from slurm_watchdog.config.notify import is_secure

DEADLINE_S = 10.0  # of one request; an outage of a receiver never delays an action
ANSWER_BYTES = 1_000_000  # more is not read: Slack repeats the message in its answer
REFUSED_FOR_GOOD = frozenset({400, 413, 415, 422})  # others (404, 401, 403) may come while a receiver is being set up


class SendFailed(Exception):
    """A message was not delivered. `permanent`: the same message will never be."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None, permanent: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s, self.permanent = reason, retry_after_s, permanent


async def post_json(
    url: str, document: Any, *, receiver: str, token: str = "", deadline_s: float = DEADLINE_S, answers: bool = False
) -> bytes:
    """Delivers `document` to `url`, with a token as a bearer if there is one. Returns what a receiver that `answers`
    has said. Raises SendFailed."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with (
            timeout(deadline_s),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=deadline_s)) as session,
            session.post(url, json=document, headers=headers, allow_redirects=False) as answer,
        ):
            said, taken = b"", 200 <= answer.status < 300
            while (answers or not taken) and len(said) < ANSWER_BYTES and (more := await answer.content.readany()):
                said += more
            if taken:
                return said
            status, asked = answer.status, answer.headers.get("Retry-After", "")
    except TimeoutError:
        raise SendFailed(f"{receiver} did not answer within {deadline_s:g} s") from None
    # `from None`: the exception below may hold the address.
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SendFailed(f"{receiver} cannot be reached ({why(error)})") from None
    # A receiver may repeat the request, with the address or its last part.
    secrets = (token, url, urlsplit(url).path, url.rstrip("/").rpartition("/")[2])
    asks = status in (429, 503) and asked.isascii() and asked.isdecimal()
    raise SendFailed(
        f"{receiver} answered {status}: {safe(without(secrets, said.decode(errors='replace')), 200)}",
        retry_after_s=float(asked) if asks else None,
        permanent=status in REFUSED_FOR_GOOD,
    )


def without(secrets: Iterable[str], text: str) -> str:
    """`text` with none of the secrets in it."""
    for secret in secrets:
        text = text.replace(secret, "(secret)") if len(secret) > 3 else text
    return text


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
    """The one line of a file; empty for no file. Raises SendFailed, without what is in it."""
    if not file:
        return ""
    try:
        text = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
        raise SendFailed(f"{key} {file} cannot be read ({why(error)})") from None
    if not text or not text.isprintable() or not text.isascii():
        raise SendFailed(f"{key} {file} does not hold one line of plain text")
    return text


def read_url(file: str, key: str) -> str:
    """An address from a file. Raises SendFailed, without naming the address."""
    url = read_secret(file, key)
    if not is_secure(url):
        raise SendFailed(f"{key} {file} holds no https:// address")
    return url
