"""How a child is started: by the agent's own spawner, the small process from which all workers are forked
(slurm_watchdog.agent.workers.child), or by that of the helper, where it takes rights."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterable

from slurm_watchdog.agent.workers.become_user import refusal_as
from slurm_watchdog.agent.workers.child import Functions, child_main, encode, spawn_for_ever
from slurm_watchdog.agent.workers.helper_client import HelperLink
from slurm_watchdog.base.loop import Waiter
from slurm_watchdog.base.os_errors import describe


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
        self.problem = ""
        """Why no child can be started now: out of descriptors, the spawner is stopped, or as a child has said
        itself."""

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
