"""Lines for people on standard error, which may lie on a filesystem that does not answer: a child writes them."""

from __future__ import annotations

import contextlib
import os
import subprocess

END_S = 1.0
"""At the end, for what is still to be written."""


class Voice:
    """Says lines, and is never held up by them: what the child has no room for is lost."""

    def __init__(self) -> None:
        """Nothing is started before the first line."""
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> set[int]:
        """The child, if there is one."""
        return {self._child.pid} if self._child is not None else set()

    def say(self, text: str) -> None:
        """One line, begun with our name."""
        line = f"slurm-watchdog: {' '.join(text.split())}\n".encode()
        with contextlib.suppress(OSError):
            if self._child is None:
                self._child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
                assert self._child.stdin is not None
                os.set_blocking(self._child.stdin.fileno(), False)
            assert self._child.stdin is not None
            os.write(self._child.stdin.fileno(), line)

    def close(self) -> None:
        """Waits for the last line, if its file answers."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)
