"""The standard input that the script gives to `run`, a here-document or a file: the first start has it as it is, each
later one from its beginning. What is read at a restart is a copy in memory, which always answers."""

from __future__ import annotations

import array
import asyncio
import ctypes
import fcntl
import os
import select
import stat
import termios
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 1 << 20  # Bytes that are kept: a here-document, and no data set.
NO_INPUT = (
    "its standard input has been read by the first start, and was not a here-document or small file: this one has none"
)
SPLICE_F_NONBLOCK = 2  # splice(2)


class GivenInput:
    """Of one command; the descriptor is read only as far as that leaves it as it was."""

    def __init__(self, fd: int = 0) -> None:
        """`fd`: the input. A terminal, a socket and a device are none, and neither is one that is closed."""
        self._fd, self._kept = -1, -1
        try:
            mode = os.fstat(fd).st_mode
            if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
                return
            self._fd = fd
            data = _whole_pipe(fd) if stat.S_ISFIFO(mode) else _rest_of_file(fd)
            if data is not None:
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
        if self._fd >= 0 and starts == 0:
            yield self._fd
        elif self._kept >= 0:
            fd = os.open(f"/proc/self/fd/{self._kept}", os.O_RDONLY | os.O_CLOEXEC)  # its own offset: 0
            try:
                yield fd
            finally:
                os.close(fd)
        else:
            yield asyncio.subprocess.DEVNULL


def _rest_of_file(fd: int) -> bytes | None:
    """What is left of a file; None where that is much. Its offset stays."""
    data = os.pread(fd, MOST + 1, os.lseek(fd, 0, os.SEEK_CUR))
    return data if len(data) <= MOST else None


def _whole_pipe(fd: int) -> bytes | None:
    """What is in a pipe that no process can write into any more, as bash leaves that of a here-document; None: more
    may come, or it could not be copied. It stays there: tee(2)."""
    waiting = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, waiting)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not any(events & select.POLLHUP for _, events in poll.poll(0)):
        return None
    if not waiting[0]:
        return b""
    reads, writes = os.pipe()
    try:
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ))
        copied = ctypes.CDLL(None).tee(fd, writes, ctypes.c_size_t(waiting[0]), SPLICE_F_NONBLOCK)
        data = os.read(reads, copied) if copied > 0 else b""
    finally:
        os.close(reads)
        os.close(writes)
    return data if len(data) == waiting[0] else None
