"""A channel for tests of what is behind it: it believes whoever answers. Nothing of the product can make such a one."""

from __future__ import annotations

from watchdog.agent.channel import DirectChannel
from watchdog.agent.post import Connection
from watchdog.agent.replies import MAX_REPLY_BYTES


def trusting(url: str, max_body: int = MAX_REPLY_BYTES) -> DirectChannel:
    """Over plain HTTP to whoever is at `url`."""
    return DirectChannel(Connection(url, max_body))
