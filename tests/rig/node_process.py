"""A process on a node of a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from tests.rig.commands import wait_until
from tests.rig.process_facts import children


class NodeProcess(subprocess.Popen):
    """A process inside a node. The pid of the Popen is the door (nsenter); signals go to the process behind it."""

    @property
    def inner_pid(self) -> int | None:
        """The process itself, as the host numbers it; None while it is being started and after it has ended."""
        return next(iter(children(self.pid)), None) if self.returncode is None else None

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process in the node. kill() ends the door as well, even if the process cannot die."""
        inner = self.inner_pid
        if inner is None:
            super().send_signal(sig)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner, sig)
        if sig == signal.SIGCONT:  # the door stops with its process
            super().send_signal(sig)
        if sig == signal.SIGKILL and not wait_until(lambda: self.poll() is not None, 0.5, 0.005):
            super().send_signal(sig)  # normally the door collects its process and ends by the same signal
