"""How a child is started: by the agent's own spawner, the small process from which all workers are forked
(slurm_watchdog.agent.workers.child), or by that of the helper, where it takes rights."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
from contextlib import suppress

from slurm_watchdog.agent.proc.kmsg import KmsgFile
from slurm_watchdog.agent.workers.become_user import refusal_as
from slurm_watchdog.agent.workers.child import Functions, child_main, decode, encode, spawn_for_ever
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import Waiter, wait_readable

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


class SpawnerDied(Exception):
    """The spawner is gone: no child can be started any more, the agent has to restart."""


class Spawner:
    """Forked when it is made, which has to be before any thread."""

    def __init__(self, functions: Functions):
        """`functions` are what workers can do."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        gc.collect()
        gc.freeze()  # the collector writes into objects, and what is written to is shared no more
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            child_main(lambda: spawn_for_ever(theirs, functions, parent))
        theirs.close()
        ours.setblocking(False)  # the spawner only forks; were it to stop, the agent must not
        self._control = ours

    def fileno(self) -> int:
        """Readable when the spawner has ended: it says nothing."""
        return self._control.fileno()

    def start(self, key: str, uid: int, fd: int) -> None:
        """Asks for a worker behind the socket `fd`. Raises OSError if it can't be asked now, SpawnerDied for good."""
        try:
            socket.send_fds(self._control, [encode([key, uid])], [fd])
        except (BrokenPipeError, ConnectionError) as error:
            raise SpawnerDied(f"no child can be started: {error}") from error

    def close(self) -> None:
        """Ends it. It only forks: nothing of it is lost."""
        self._control.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


class Starter:
    """Asks for children; none of it waits."""

    def __init__(self, spawner: Spawner, helper: HelperLink | None, waiter: Waiter):
        """`waiter` watches the connection to the helper, too."""
        self._spawner, self._helper, self._waiter = spawner, helper, waiter
        self.problem = ""  # Why no child can be started now.

    def start(self, key: str, uid: int, now: float, helped: bool) -> socket.socket | None:
        """Our end of a new child's socket; None, with `problem`, if it can't be asked for. Raises SpawnerDied."""
        if helped and uid >= 0 and (refusal := refusal_as(uid)) is not None:
            self.problem = refusal  # the helper would refuse each time
            return None
        if helped and not self._has_helper(now):
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            self.problem = f"no child can be started: {describe(error)}"
            return None
        with theirs:
            ours.setblocking(False)
            try:
                if helped and self._helper is not None:
                    self._helper.start(key, uid, theirs.fileno())
                else:
                    self._spawner.start(key, uid, theirs.fileno())
            except SpawnerDied:
                ours.close()
                raise
            except OSError as error:
                ours.close()
                self._report_failure(error, helped)
                return None
        return ours

    def disconnect_helper(self, why: str) -> None:
        """Its children have died with it: each tells by the end of its own socket, but for those that hang."""
        if self._helper is not None and self._helper.sock is not None:
            self._waiter.forget(self._helper.sock.fileno())
            self._helper.disconnect(why)

    def _report_failure(self, error: OSError, helped: bool) -> None:
        if helped and not isinstance(error, BlockingIOError):
            self.disconnect_helper(describe(error))
        who = "the helper starts no child" if helped else "no child can be started"
        self.problem = f"{who}: {describe(error)}"

    def _has_helper(self, now: float) -> bool:
        assert self._helper is not None
        if self._helper.sock is None:
            sock = self._helper.connect(now)
            if sock is not None:
                self._waiter.watch(sock.fileno())
        return self._helper.sock is not None
