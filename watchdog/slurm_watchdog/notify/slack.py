"""Slack through slack-sdk: an incoming webhook, or a bot with its token, which can open threads and change
its own messages."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import aiohttp
from slack_sdk.errors import SlackApiError, SlackClientError
from slack_sdk.web.async_client import AsyncWebClient
from slack_sdk.webhook.async_client import AsyncWebhookClient

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.text import safe
from slurm_watchdog.notify.http import SendFailed, read_secret, read_url, retry_after, why, without_secrets
from slurm_watchdog.notify.slack_messages import Payload

# The client of slack-sdk writes the webhook's address to its log at debug level, and NOTSET counts as that.
SILENT = logging.getLogger("slurm_watchdog.notify.slack.client")
SILENT.setLevel(logging.CRITICAL + 1)

OF_THE_MESSAGE = frozenset(
    {
        "invalid_blocks", "invalid_blocks_format", "msg_blocks_too_long", "msg_too_long", "no_text",
        "too_many_attachments",
        "invalid_attachments", "invalid_arguments", "metadata_too_large", "cant_update_message", "edit_window_closed",
    }
)  # fmt: skip
"""Errors of chat.postMessage and chat.update after which the same message is not sent again. All others (a token
that was revoked, a channel that was archived, an outage of theirs) may be mended:
https://docs.slack.dev/reference/methods/chat.postMessage#errors"""
OF_THE_THREAD = frozenset(
    {"thread_not_found", "message_not_found", "cannot_reply_to_message", "invalid_thread_ts", "cant_update_message"}
)  # fmt: skip
"""The parent message was deleted: the message is posted without a thread."""


class Poster(Protocol):
    """A destination of Slack messages. Both methods have their own deadline and raise SendFailed."""

    threads: bool
    """Whether `post` can put a message below another one."""

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        """Deliver; returns the name of the thread that begins with it, None if there are none. `loud`: a
        reply that the channel sees, too."""
        ...

    async def revise(self, thread: str, message: Payload) -> None:
        """Put `message` in the place of the first one of a thread."""
        ...


class SlackWebhook:
    """Sends to the incoming webhook whose address is in `url_file`; the file is read for each message.

    The address is a secret: it appears in no log and no exception. `deadline_s` is for one message.
    """

    threads = False

    def __init__(self, url_file: str, deadline_s: float) -> None:
        self._url_file = url_file
        self._deadline_s = deadline_s

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        """Deliver one message. Raises SendFailed."""
        url = read_url(self._url_file, "notify.slack.webhook_url_file")
        client = AsyncWebhookClient(url, timeout=max(1, round(self._deadline_s)), logger=SILENT, retry_handlers=[])
        try:
            async with timeout(self._deadline_s):
                answer = await client.send_dict(message)
        except TimeoutError:
            raise SendFailed(f"Slack did not answer within {self._deadline_s:g} s") from None
        # `from None`: the exception below may hold the address.
        except (aiohttp.ClientError, SlackClientError, OSError, ValueError) as error:
            raise SendFailed(f"Slack can't be reached ({why(error)})") from None
        if answer.status_code == 200:
            return None
        said = without_secrets(str(answer.body), url)
        raise SendFailed(
            f"Slack answered {answer.status_code}: {safe(said, 100)}",
            retry_after_s=retry_after(answer.headers) if answer.status_code == 429 else None,
            # The same message will not be taken later either.
            permanent=answer.status_code == 400,
        )

    async def revise(self, thread: str, message: Payload) -> None:
        """A webhook can't."""


class SlackBot:
    """Speaks as the bot whose token is in `token_file` (scope chat:write), in `channel`. The token appears in
    no log and no exception."""

    threads = True

    def __init__(self, token_file: str, channel: str, deadline_s: float, api_url: str) -> None:
        self._token_file = token_file
        self._channel = channel
        self._deadline_s = deadline_s
        self._api_url = api_url.rstrip("/") + "/"

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        """chat.postMessage; the thread's name is `CHANNEL/TIMESTAMP`. Raises SendFailed."""
        arguments = {key: value for key, value in message.items() if key != "link_names"}
        arguments |= {"channel": self._channel, "parse": "none"}
        if thread is not None:
            channel, _, at = thread.partition("/")
            arguments |= {"channel": channel, "thread_ts": at, "reply_broadcast": loud}
        try:
            answer = await self._call("chat.postMessage", arguments)
        except ThreadGone:
            return await self.post(message)
        begun, where = answer.get("ts"), answer.get("channel")
        if thread is not None or not isinstance(begun, str) or not isinstance(where, str):
            return thread
        return f"{where}/{begun}"

    async def revise(self, thread: str, message: Payload) -> None:
        """chat.update. A message that is not there any more needs none. Raises SendFailed."""
        channel, _, at = thread.partition("/")
        arguments = {"channel": channel, "ts": at, "text": message["text"], "blocks": message["blocks"]}
        try:
            await self._call("chat.update", arguments | {"parse": "none", "link_names": False})
        except ThreadGone:
            return

    async def _call(self, method: str, arguments: Payload) -> dict[str, Any]:
        token = read_secret(self._token_file, "notify.slack.token_file")
        client = AsyncWebClient(
            token=token, base_url=self._api_url, timeout=max(1, round(self._deadline_s)), logger=SILENT,
            retry_handlers=[]
        )  # fmt: skip
        try:
            async with timeout(self._deadline_s):
                answer = await client.api_call(method, json=arguments)
        except TimeoutError:
            raise SendFailed(f"Slack did not answer within {self._deadline_s:g} s") from None
        except SlackApiError as error:
            raise _refusal(error, token) from None
        except (aiohttp.ClientError, SlackClientError, OSError, ValueError, AttributeError) as error:
            raise SendFailed(f"Slack can't be reached ({why(error)})") from None
        return answer.data if isinstance(answer.data, dict) else {}


class ThreadGone(SendFailed):
    """The parent message was deleted."""


def _refusal(error: SlackApiError, token: str) -> SendFailed:
    """What an answer that is no `ok: true` means for the message."""
    response = error.response
    status = getattr(response, "status_code", None) or getattr(response, "status", 0)
    data = getattr(response, "data", None)
    code = str(data.get("error", "")) if isinstance(data, dict) else ""
    reason = f"Slack answered {status}{': ' if code else ''}{safe(code.replace(token, '(token)'), 100)}"
    if status == 429 or code in ("ratelimited", "rate_limited"):
        return SendFailed(reason, retry_after_s=retry_after(getattr(response, "headers", {})))
    if code in OF_THE_THREAD:
        return ThreadGone(reason, permanent=True)
    return SendFailed(reason, permanent=code in OF_THE_MESSAGE)
