"""A helper and an agent as their units start them: the helper nobody in particular with a few capabilities,
the agent without any."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.rig.rights import (
    AGENT_UID,
    CAPABILITIES,
    CHECKOUT,
    HELPER_UID,
    Place,
    agent_command,
    as_user,
    furnish,
    helper_command,
    parts_of_a_place,
)

__all__ = [
    "AGENT_UID",
    "CAPABILITIES",
    "CHECKOUT",
    "HELPER_UID",
    "Place",
    "agent_command",
    "as_user",
    "helper",
    "helper_command",
    "place",
]

START_S = 120.0


@dataclass
class HelperProcess:
    """One helper. `process` is the newest: it may have been killed and started again."""

    place: Place
    socket: Path
    log: Path
    process: subprocess.Popen[bytes]

    def start_again(self) -> None:
        """A new one, after the old one has ended."""
        self.process = _start(self.place, self.socket, self.log)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


def why_impossible() -> str | None:
    """Why no helper can be started here; None if one can."""
    if os.geteuid() != 0:
        return "needs root, who alone can start somebody with a few capabilities"
    if shutil.which("setpriv") is None:
        return "setpriv (util-linux) is not installed"
    done = subprocess.run(as_user(HELPER_UID, CAPABILITIES, ["true"]), capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"the helper's capabilities are unavailable here: {done.stderr.strip()}"


def run_here(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


@contextmanager
def place(run: Callable[..., object] = run_here) -> Iterator[Place]:
    """The interpreter, its packages and the checkout, bound under /tmp: they may lie below a home that nobody
    else may enter.

    `run` runs a command where it is to be used, in a node of a cluster perhaps.
    """
    directory = Path(tempfile.mkdtemp(prefix="slurm-watchdog-place-"))
    directory.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for name, source in parts_of_a_place().items():
            (directory / name).mkdir()
            run("mount", "--bind", source, directory / name)
            stack.callback(run, "umount", "--lazy", directory / name)
        yield furnish(directory)


def _start(where: Place, socket: Path, log: Path) -> subprocess.Popen[bytes]:
    before = log.read_text(errors="replace").count("serving the agent")
    with log.open("ab") as out:
        process = subprocess.Popen(
            helper_command(where, socket, prefixes=["/tmp"]),
            stdout=out,
            stderr=out,
            env=dict(where.environment),
            cwd="/",
        )
    end = time.monotonic() + START_S
    while log.read_text(errors="replace").count("serving the agent") == before:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the helper does not start: {log.read_text(errors='replace')}")
        time.sleep(0.05)
    return process


@contextmanager
def helper(where: Place) -> Iterator[HelperProcess]:
    """A helper for an agent of AGENT_UID."""
    directory = where.directory / "helper"
    directory.mkdir(mode=0o755)
    shutil.chown(directory, HELPER_UID, HELPER_UID)
    log = where.directory / "helper.log"
    log.write_text("")
    made = HelperProcess(where, directory / "socket", log, _start(where, directory / "socket", log))
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
