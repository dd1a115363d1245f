"""The agent's side of its helper: a connection that is made when something is wanted, and made again when it broke.

Nothing here waits, but for the descriptor of the kernel's log, and there for a quarter of a second. A helper
that does not answer costs the deadline of what was asked; one that is gone is looked for again with the next
request, at most once in a second.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import suppress

from slurm_watchdog.agent.kernel.kmsg import KmsgFile
from slurm_watchdog.agent.workers.child import decode, encode
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.base.os_errors import describe

log = logging.getLogger(__name__)

RETRY_S = 1.0
KERNEL_LOG_S = 0.25  # The loop waits so long for the kernel's log; it is opened once, and again only when it broke.


def is_usable(path: str) -> bool:
    """Whether there is a helper for this process: a socket that it may write to."""
    return bool(path) and os.geteuid() != 0 and os.access(path, os.W_OK)


class HelperLink:
    """One connection to the helper at `path`."""

    def __init__(self, path: str):
        self.path = path
        self.sock: socket.socket | None = None
        self.problem = ""  # Why there is no connection now.
        self._retry_at = float("-inf")

    def connect(self, now: float) -> socket.socket | None:
        """The connection, made again if it was lost; None, with `problem`, while there is none."""
        if self.sock is None and now >= self._retry_at:
            self._retry_at = now + RETRY_S
            try:
                self.sock = _connect(self.path)
            except OSError as error:
                problem = f"{self.path}: {describe(error)}"
                if problem != self.problem:
                    log.warning("the helper is unavailable: %s", problem)
                self.problem = problem
            else:
                if self.problem:
                    log.warning("the helper is back")
                self.problem = ""
        return self.sock

    def start(self, key: str, uid: int, fd: int) -> None:
        """Asks for a child behind the socket `fd`. Raises OSError; BlockingIOError if the helper does not listen."""
        if self.sock is None:
            raise OSError(errno.ENOTCONN, "there is no helper")
        socket.send_fds(self.sock, [encode([key, uid])], [fd])

    def end(self, pid: int) -> None:
        """Asks for the end of a child that gives no answer. Raises OSError."""
        if self.sock is not None:
            self.sock.send(encode(["end child", pid]))

    def disconnect(self, why: str) -> None:
        """Lets go of a connection that is of no use any more; to be called before anybody waits for it again."""
        if self.sock is not None:
            self.sock.close()
        self.sock, self.problem = None, f"{self.path}: {why}"
        log.warning("the helper has exited: %s", self.problem)

    def open_kernel_log(self, path: str) -> KmsgFile:
        """The kernel's log, opened here if that is allowed, otherwise by the helper. Raises OSError."""
        try:
            return KmsgFile(path)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV):
                raise
        with _connect(self.path) as sock:
            sock.send(encode(["kernel log"]))
            if not wait_readable([sock.fileno()], KERNEL_LOG_S):
                raise OSError(errno.ETIMEDOUT, "the helper does not answer")
            message, fds, _, _ = socket.recv_fds(sock, 4096, 1)
        if not fds:
            words = decode(message) if message else ["the helper has ended the connection"]
            raise OSError(errno.EACCES, str(words[0]))
        return KmsgFile(path, fds[0])

    def close(self) -> None:
        """Lets go."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except OSError:
        with suppress(OSError):
            sock.close()
        raise
    return sock
