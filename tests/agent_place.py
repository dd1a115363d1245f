"""The agent as its unit starts it, for tests: the place that its user may enter, and whether it can be started here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.rig.rights import AGENT_UID, CAPABILITIES, Place, as_user, furnish, parts_of_a_place


def why_impossible() -> str | None:
    """Why no agent with its rights can be started here; None if one can."""
    if os.geteuid() != 0:
        return "needs root, who alone can start somebody with a few capabilities"
    if shutil.which("setpriv") is None:
        return "setpriv (util-linux) is not installed"
    done = subprocess.run(as_user(AGENT_UID, CAPABILITIES, ["true"]), capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"the agent's capabilities are unavailable here: {done.stderr.strip()}"


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
