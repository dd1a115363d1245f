"""The agent's connection to the controller, by the way in which nodes prove who they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from watchdog.agent.post import Connection
from watchdog.agent.replies import MAX_REPLY_BYTES
from watchdog.agent.settings import SecuritySettings
from watchdog.identity.files import TlsFiles

if TYPE_CHECKING:
    from watchdog.agent.munge_session import ProvenConnection


def connect(url: str, security: SecuritySettings, node: str) -> Connection | ProvenConnection:
    """A connection of `node` to the controller at `url`; no traffic yet."""
    files = TlsFiles(security.tls_directory, "agent") if security.mode == "tls" else None
    connection = Connection(url, MAX_REPLY_BYTES, files=files)
    if security.mode != "munge":
        return connection
    from watchdog.agent.munge_session import Munge, ProvenConnection

    return ProvenConnection(connection, node, Munge(security.controller_user, security.munge_socket).encode)
