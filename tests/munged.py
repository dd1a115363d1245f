"""A munged of our own, for tests: the real program, with a key and a socket of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MUNGED = shutil.which("munged") or "/usr/sbin/munged"
THERE = os.path.exists(MUNGED)
START_S = 30.0


@dataclass
class Munged:
    """A running munged, and where to ask it."""

    socket: str
    pid: int

    def hang(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def security(self, user: int | None = None) -> dict[str, str]:
        """The section `security` of a controller of `user` (our own) and its agents, who may be root's or
        anybody's that it takes."""
        own = str(os.geteuid() if user is None else user)
        return {"mode": "munge", "controller_user": own, "agent_user": own, "munge_socket": self.socket}


@contextmanager
def munged() -> Iterator[Munged]:
    """Runs one while the block runs; everybody may ask it."""
    # A socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="munged-", dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "key").touch(mode=0o600)
        (place / "key").write_bytes(os.urandom(128))
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={place / name}" for option, name in files.items()]
        process = subprocess.Popen(
            [MUNGED, "--foreground", "--force", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            end = time.monotonic() + START_S
            while not (place / "socket").exists():
                assert process.poll() is None and time.monotonic() < end, "munged does not start"
                time.sleep(0.01)
            yield Munged(str(place / "socket"), process.pid)
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(10)
