"""The agent's channel to the controller, by the way in which both prove who they are."""

from __future__ import annotations

from typing import assert_never

from watchdog.agent.channel import Channel, tls_channel, unix_channel
from watchdog.agent.post import Connection
from watchdog.agent.replies import MAX_REPLY_BYTES
from watchdog.agent.settings import SecuritySettings
from watchdog.identity.files import TlsFiles

UNIX = "unix:"
"""What `controller_url` begins with where it names a socket; `slurm-watchdog run` sets it, no file can."""


def connect(url: str, security: SecuritySettings, node: str) -> Channel:
    """A channel of `node` to the controller at `url`; no traffic yet."""
    match security.mode:
        case "tls":
            return tls_channel(url, MAX_REPLY_BYTES, TlsFiles(security.tls_directory, "agent"))
        case "munge":
            # Only here: the other agents do without its memory.
            from watchdog.agent.munge_session import Munge, ProvenConnection

            encode = Munge(security.controller_user, security.munge_socket).encode
            return ProvenConnection(Connection(url, MAX_REPLY_BYTES), node, encode)
        case "unix":
            return unix_channel(url.removeprefix(UNIX), MAX_REPLY_BYTES)
        case _:
            assert_never(security.mode)
