"""The standard input that the script gives to `run`: each later start has a here-document or a file again from where it
began, and nothing of any other pipe."""

from __future__ import annotations

import asyncio
import os
import select
import stat
from contextlib import suppress

NO_INPUT = "its standard input has been read by the first start, and was not a here-document or file: this one has none"


class GivenInput:
    """Of one command. Nothing is read at a restart: a filesystem that hangs holds up none."""

    def __init__(self, fd: int = 0) -> None:
        """`fd`: the input. A terminal, a socket and a device are none, and neither is one that is closed."""
        self._fd, self._begins_at = -1, -1
        with suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                self._fd, self._begins_at = fd, os.lseek(fd, 0, os.SEEK_CUR)
            elif stat.S_ISFIFO(mode):
                self._fd = fd
                if _is_whole(fd):
                    self._fd, self._begins_at = _copy(fd), 0

    def is_lost(self, starts: int) -> bool:
        """Whether a start has none, though the first one had; `starts`: how often the command was started before."""
        return starts > 0 and self._fd >= 0 > self._begins_at

    def of_start(self, starts: int) -> int:
        """What asyncio and subprocess take as stdin."""
        if self._fd < 0 or self.is_lost(starts):
            return asyncio.subprocess.DEVNULL
        if self._begins_at >= 0:
            os.lseek(self._fd, self._begins_at, os.SEEK_SET)
        return self._fd


def _is_whole(fd: int) -> bool:
    """Whether no process can write into a pipe any more, as bash leaves that of a here-document."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _copy(fd: int) -> int:
    """What is left in it, in memory."""
    kept = os.memfd_create("slurm-watchdog-input")
    while data := os.read(fd, 65_536):
        os.write(kept, data)
    return kept
