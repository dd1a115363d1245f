"""A descriptor for the length of a block."""

from __future__ import annotations

import os
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
