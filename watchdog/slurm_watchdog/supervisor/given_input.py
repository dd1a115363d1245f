"""The standard input that the script gives to `run`: each later start has a here-document or a file again from where it
began, and nothing of any other pipe."""

from __future__ import annotations

import array
import asyncio
import ctypes
import fcntl
import os
import select
import stat
import termios
from contextlib import suppress

NO_INPUT = "its standard input has been read by the first start, and was not a here-document or file: this one has none"
SPLICE_F_NONBLOCK = 2  # splice(2)


class GivenInput:
    """Of one command. Nothing is read at a restart: a filesystem that hangs holds up none. What the command does not
    read stays where it is: a loop, or the shell that reads its script there, continues with it."""

    def __init__(self, fd: int = 0) -> None:
        """`fd`: the input. A terminal, a socket and a device are none, and neither is one that is closed."""
        self._fd, self._again, self._begins_at = -1, -1, 0  # of the first start, and of each later one
        with suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                self._begins_at = os.lseek(fd, 0, os.SEEK_CUR)
                self._fd = self._again = fd
            elif stat.S_ISFIFO(mode):
                self._fd = fd
                if _is_whole(fd):
                    self._again = _copy(fd)

    def is_lost(self, starts: int) -> bool:
        """Whether a start has none, though the first one had; `starts`: how often the command was started before."""
        return starts > 0 and self._fd >= 0 > self._again

    def of_start(self, starts: int) -> int:
        """What asyncio and subprocess take as stdin."""
        fd = self._again if starts else self._fd
        if fd < 0:
            return asyncio.subprocess.DEVNULL
        if fd == self._again:
            os.lseek(fd, self._begins_at, os.SEEK_SET)
        return fd


def _is_whole(fd: int) -> bool:
    """Whether no process can write into a pipe any more, as bash leaves that of a here-document."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _copy(fd: int) -> int:
    """What is left in it, in memory, and stays there: tee(2). -1: it could not be copied. Raises OSError."""
    waiting, data = array.array("i", [0]), b""
    fcntl.ioctl(fd, termios.FIONREAD, waiting)
    if waiting[0]:
        reads, writes = os.pipe()
        try:
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ))
            copied = ctypes.CDLL(None).tee(fd, writes, ctypes.c_size_t(waiting[0]), SPLICE_F_NONBLOCK)
            data = os.read(reads, copied) if copied > 0 else b""
        finally:
            os.close(reads)
            os.close(writes)
    if len(data) != waiting[0]:
        return -1
    kept = os.memfd_create("slurm-watchdog-input")
    os.write(kept, data)
    return kept
