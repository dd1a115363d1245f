"""A descriptor for the length of a block, the text of an OSError, whether an address can be listened at."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def opened(path: str, flags: int, where: int | None = None, mode: int = 0o600) -> Iterator[int]:
    """Opens `path`, relative to the directory `where` if that is given; closed after the block. Raises OSError."""
    with closing(os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=where)) as fd:
        yield fd


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """`fd`, closed after the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def describe(error: OSError) -> str:
    """`EACCES: Permission denied: '/x'`: the name of the error, which people search for, and its words."""
    name = errno.errorcode.get(error.errno or 0, "error")
    where = f": {error.filename!r}" if error.filename is not None else ""
    return f"{name}: {error.strerror or error}{where}"


def why_not_address(host: str, port: int) -> str | None:
    """Why no one can listen there; None: one can. Looked at before a process with another configuration takes over."""
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        return f"cannot be listened on: {error.strerror or error}"
    return None
