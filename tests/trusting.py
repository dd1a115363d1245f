"""A channel for tests of what is behind it: it believes any server that answers. Nothing of the product can make such a channel."""

from __future__ import annotations

from slurm_watchdog.agent.delivery.channel import MAX_REPLY_BYTES, DirectChannel
from slurm_watchdog.wire.http_client import Connection


def trusting(url: str, max_body: int = MAX_REPLY_BYTES) -> DirectChannel:
    """Over plain HTTP to the server at `url`."""
    return DirectChannel(Connection(url, max_body))
