"""A helper and an agent as their units start them: the helper nobody in particular with a few capabilities, the agent without any."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

CAPABILITIES = ("sys_ptrace", "dac_read_search", "syslog", "chown", "setuid", "setgid", "kill")
"""As in systemd/slurm-watchdog-helper.service: a test compares them."""
HELPER_UID, AGENT_UID = 64981, 64982
"""Of nobody else here."""
CHECKOUT = Path(__file__).resolve().parents[1]
START_S = 120.0


@dataclass(frozen=True)
class Place:
    """Where anybody may run our code: an interpreter, and what it needs, under a path that is open to all."""

    directory: Path
    python: Path
    environment: Mapping[str, str]

    def command(self, uid: int, capabilities: Sequence[str], *words: str) -> list[str]:
        return as_user(uid, capabilities, [str(self.python), *words])


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
    done = subprocess.run(
        as_user(HELPER_UID, CAPABILITIES, ["true"]), capture_output=True, text=True, check=False
    )
    return (
        None
        if done.returncode == 0
        else f"the helper's capabilities can't be had here: {done.stderr.strip()}"
    )


def as_user(uid: int, capabilities: Sequence[str], command: list[str]) -> list[str]:
    """`command` as this user, with exactly these capabilities."""
    chosen = ",".join(["-all", *(f"+{each}" for each in capabilities)])
    rights = [f"--inh-caps={chosen}", f"--ambient-caps={chosen}", f"--bounding-set={chosen}"]
    who = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
    return ["setpriv", *who, *rights, "--", *command]


def run_here(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


@contextmanager
def place(run: Callable[..., object] = run_here) -> Iterator[Place]:
    """The interpreter, its packages and the checkout, bound under /tmp: they may lie below a home that nobody else may enter.

    `run` runs a command where it is to be used, in a node of a cluster perhaps.
    """
    directory = Path(tempfile.mkdtemp(prefix="slurm-watchdog-place-"))
    directory.chmod(0o755)
    packages = next(path for path in site.getsitepackages() if (Path(path) / "msgspec").is_dir())
    parts = {"python": Path(sys.base_prefix), "packages": Path(packages), "checkout": CHECKOUT}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for name, source in parts.items():
            (directory / name).mkdir()
            run("mount", "--bind", source, directory / name)
            stack.callback(run, "umount", "--lazy", directory / name)
        python = directory / "python" / "bin" / f"python{sysconfig.get_python_version()}"
        tools = directory / "tools"
        tools.mkdir()
        shutil.copy(Path(sys.executable).with_name("py-spy"), tools)
        path = f"{directory}/checkout:{directory}/packages"
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        yield Place(directory, python, environment)


def helper_command(where: Place, socket: Path) -> list[str]:
    """The helper of AGENT_UID, as its user."""
    words = ("-m", "watchdog.agent.helper_main", str(socket), str(AGENT_UID))
    return where.command(HELPER_UID, CAPABILITIES, *words)


def agent_command(where: Place, *words: str) -> list[str]:
    """`slurm-watchdog agent …`, as a user without a capability."""
    program = "import sys; from watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
    return where.command(AGENT_UID, (), "-c", program, "agent", *words)


def _start(where: Place, socket: Path, log: Path) -> subprocess.Popen[bytes]:
    before = log.read_text(errors="replace").count("serving the agent")
    with log.open("ab") as out:
        process = subprocess.Popen(
            helper_command(where, socket),
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
