"""The agent's channel to the controller, by the way in which both prove who they are."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.agent.delivery.channel import Channel, InTurn, tls_channel, unix_channel
from slurm_watchdog.agent.delivery.replies import MAX_REPLY_BYTES
from slurm_watchdog.config.security import Security
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.wire.http_client import Connection

UNIX = "unix:"  # What `controller_url` begins with where it names a socket; `slurm-watchdog run` sets it, no file can.


def connect_in_turn(urls: Sequence[str], security: Security, node: str) -> Channel:
    """A channel to that of several controllers which takes reports; no traffic yet."""
    return InTurn([connect(url, security, node) for url in urls])


def connect(url: str, security: Security, node: str) -> Channel:
    """A channel of `node` to the controller at `url`; no traffic yet."""
    if url.startswith(UNIX):
        return unix_channel(url.removeprefix(UNIX), MAX_REPLY_BYTES)
    if security.identity() == "tls":
        return tls_channel(url, MAX_REPLY_BYTES, TlsFiles(security.tls_directory, "agent"))
    # Only here: the other agents do without its memory.
    from slurm_watchdog.agent.delivery.munge_connection import Munge, ProvenConnection

    encode = Munge(security.controller_user, security.munge_socket).encode
    return ProvenConnection(Connection(url, MAX_REPLY_BYTES), node, encode)
