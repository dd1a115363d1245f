"""A PID namespace for the job, the agent and its peers: what else runs on this machine is neither seen nor
counted by them.

Two benchmarks, or a benchmark and somebody's test cluster, thus don't change each other's figures but by taking the
processor. The benchmark itself stays outside, where the kernel's traces have the same numbers of processes as /proc.
Without root there is no namespace, and everything runs where we are.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.bench.figures import say

START_S = 10.0


@dataclass(frozen=True)
class Space:
    """Where the measured processes live. `init` is the first of them, None: they live with us."""

    init: int | None = None

    def words(self, command: Sequence[str], uid: int | None = None) -> list[str]:
        """`command` as it has to be started to run in there, as user `uid`."""
        words = list(command)
        if uid is not None and uid != os.geteuid():
            words = [
                "setpriv",
                f"--reuid={uid}",
                f"--regid={pwd.getpwuid(uid).pw_gid}",
                "--clear-groups",
                *words,
            ]
        if self.init is not None:
            words = ["nsenter", f"--target={self.init}", "--pid", "--mount", "--wdns=/", *words]
        return words

    def find(self, pid: int) -> int:
        """The process that was started by `words`: below nsenter, which stays outside. Raises TimeoutError."""
        if self.init is None:
            return pid
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children and _is_running(int(children[0])):
                return int(children[0])
            time.sleep(0.01)
        raise TimeoutError(f"process {pid} has started nothing in the namespace of {self.init}")

    def seen_from_here(self, path: Path) -> Path:
        """The file or directory that those in there know by this path."""
        return path if self.init is None else Path(f"/proc/{self.init}/root{path}")

    def mount_memory(self, point: Path) -> None:
        """Puts a filesystem of its own on `point`, in there only; where we can't, `point` stays what it is."""
        if self.init is not None:
            words = ["mount", "-t", "tmpfs", "-o", "mode=755,size=256m", "tmpfs", str(point)]
            subprocess.run(["nsenter", f"--target={self.init}", "--mount", *words], check=True, timeout=60)

    def inner(self, pid: int) -> int:
        """The number of a process in there, by which those in there know it."""
        status = Path(f"/proc/{pid}/status").read_text()
        line = next((line for line in status.splitlines() if line.startswith("NSpid:")), f"NSpid: {pid}")
        return int(line.split()[-1])


def _is_running(pid: int) -> bool:
    """Whether it has become the program that it was started for."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) not in ("nsenter", "setpriv")
    except OSError:
        return False


@contextmanager
def opened(first: Sequence[str]) -> Iterator[Space]:
    """A space whose first process is `first`, while the block runs; all that lives in it ends with it, and
    with this process."""
    if os.geteuid() != 0:
        with _alone(first):
            yield Space()
        return
    command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", *first]
    outer = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL)
    try:
        init = _wait_for_init(outer, os.path.basename(first[0]))
        if init is None:
            say("no PID namespace can be had here: other processes of this machine are seen and counted, too")
        yield Space(init)
    finally:
        outer.kill()  # and with it the first process in there, and with that all others
        outer.wait(30)


@contextmanager
def _alone(first: Sequence[str]) -> Iterator[None]:
    process = subprocess.Popen(first, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(30)


def _wait_for_init(outer: subprocess.Popen[bytes], name: str) -> int | None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and outer.poll() is None:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            if children and os.path.basename(os.readlink(f"/proc/{children[0]}/exe")) == name:
                return int(children[0])
        except OSError:
            pass
        time.sleep(0.01)
    return None
