"""A filesystem of a server in user space (fuse_server.py) that can be made silent."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NOBODY = 60983
"""An ordinary user without a name."""


@dataclass
class Silent:
    """A mounted filesystem whose server can be silenced."""

    point: Path
    server: subprocess.Popen[str]

    def silence(self) -> None:
        self.server.send_signal(signal.SIGSTOP)

    def speak(self) -> None:
        self.server.send_signal(signal.SIGCONT)


@contextmanager
def mounted(point: Path) -> Iterator[Silent]:
    """The filesystem at `point`, a directory that is made; it answers again, and is gone, at the end."""
    point.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("fuse_server.py")), str(point)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "mounted\n"
    yield Silent(point, server)
    server.send_signal(signal.SIGCONT)
    unmount(point)
    server.kill()
    server.wait(10)


def unmount(point: Path) -> None:
    if subprocess.run(["umount", str(point)], capture_output=True, timeout=180).returncode != 0:
        subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=180)
