"""Whether an address can be listened at: looked at before a process with another configuration takes over."""

from __future__ import annotations

import socket


def why_not_address(host: str, port: int) -> str | None:
    """Why no one can listen there; None: one can."""
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        return f"cannot be listened on: {error.strerror or error}"
    return None
