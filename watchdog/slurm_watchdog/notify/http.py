"""One POST of a JSON document, within a deadline, and what its answer means for the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.text import safe
from slurm_watchdog.notify import SendFailed
from slurm_watchdog.notify.failure import why
from slurm_watchdog.notify.slack import retry_after, without_secrets

ANSWER_BYTES = 2000
"""Bytes of an answer that are read: it begins with the error."""
REFUSED_FOR_GOOD = frozenset({400, 413, 415, 422})
"""Statuses after which the same document is not sent again. Others (404, 401, 403) may come from a receiver
that is being set up."""


async def post_json(
    url: str, document: Any, deadline_s: float, *, receiver: str, headers: Mapping[str, str] | None = None
) -> None:
    """Deliver `document` to `url`, which is a secret and appears in no exception. Raises SendFailed."""
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
