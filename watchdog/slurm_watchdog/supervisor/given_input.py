"""The standard input that the script gives to `run`, a here-document or a file: the first start has it as it is, each
later one from its beginning. What is read at a restart is a copy in memory, which always answers."""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 1 << 20  # Bytes that are kept: a here-document, and no data set.
NO_INPUT = (
    "its standard input has been read by the first start, and was not a here-document or small file: this one has none"
)


class GivenInput:
    """Of one command."""

    def __init__(self, fd: int = 0) -> None:
        """`fd`: the input. A terminal, a socket and a device are none, and neither is one that is closed. The offset of
        a file stays: a shell may read its script there."""
        self._fd, self._first, self._kept = -1, -1, -1
        try:
            mode = os.fstat(fd).st_mode
            if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
                return
            self._fd = self._first = fd
            if stat.S_ISREG(mode):
                data = os.pread(fd, MOST + 1, os.lseek(fd, 0, os.SEEK_CUR))
                if len(data) > MOST:
                    return
            else:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                if not any(events & select.POLLHUP for _, events in poll.poll(0)):
                    return  # someone may still write: bash leaves none such behind a here-document
                data, self._first = b"".join(iter(lambda: os.read(fd, MOST), b"")), -1
            self._kept = os.memfd_create("slurm-watchdog-input")
            os.write(self._kept, data)
        except OSError:
            self._kept = -1

    def is_lost(self, starts: int) -> bool:
        """Whether a start has none, though the first one had; `starts`: how often the command was started before."""
        return starts > 0 and self._fd >= 0 and self._kept < 0

    @contextmanager
    def of_start(self, starts: int) -> Iterator[int]:
        """What asyncio and subprocess take as stdin."""
        if self._first >= 0 and starts == 0:
            yield self._first
        elif self._kept >= 0:
            fd = os.open(f"/proc/self/fd/{self._kept}", os.O_RDONLY | os.O_CLOEXEC)  # its own offset: 0
            try:
                yield fd
            finally:
                os.close(fd)
        else:
            yield asyncio.subprocess.DEVNULL
