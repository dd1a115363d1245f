"""The agent's end of its spawner: the small process from which all workers are forked
(slurm_watchdog.agent.workers.child)."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterable

from slurm_watchdog.agent.workers.child import Functions, child_main, encode, spawn_for_ever
from slurm_watchdog.base.loop import wait_readable


class SpawnerDied(Exception):
    """The spawner is gone: no child can be started any more, the agent has to restart."""


class Spawner:
    """Forked when it is made, which has to be before any thread."""

    def __init__(self, functions: Functions, to_close: Iterable[socket.socket] = ()):
        """`functions` are what workers can do; `to_close` is the agent's alone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, kept = os.getpid(), list(to_close)
        gc.collect()
        gc.freeze()  # the collector writes into objects, and what is written to is shared no more
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            child_main(lambda: spawn_for_ever(theirs, functions, parent, kept))
        theirs.close()
        ours.setblocking(False)  # the spawner only forks; were it to stop, the agent must not
        self._control = ours

    def fileno(self) -> int:
        """Readable when the spawner has ended: it says nothing."""
        return self._control.fileno()

    def start(self, key: str, uid: int, fd: int) -> None:
        """Asks for a worker behind the socket `fd`. Raises OSError if it can't be asked now, SpawnerDied if
        it never can be again."""
        try:
            socket.send_fds(self._control, [encode([key, uid])], [fd])
        except (BrokenPipeError, ConnectionError) as error:
            raise SpawnerDied(f"no child can be started: {error}") from error

    def has_died(self) -> bool:
        """Whether it has ended."""
        return bool(wait_readable([self.fileno()], 0))

    def close(self) -> None:
        """Ends it. It only forks: nothing of it is lost."""
        self._control.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
