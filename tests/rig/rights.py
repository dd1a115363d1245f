"""Who the watchdog's agent is on a demo cluster, as its unit has it: a user of its own with a few capabilities.

It may not enter the home of the user who starts it, where interpreter and checkout may lie: those are
bound under a path that is open to all (`Place`). Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CAPABILITIES = ("setuid", "setgid", "sys_ptrace", "kill", "syslog")
"""As in systemd/slurm-watchdog-agent.service: a test compares them."""
AGENT_UID = 64982
"""Of nobody else here."""
USER, USER_UID = "swd-trainer", 60983
"""Whose jobs are, where nobody else is named: an ordinary user."""
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    """Where anybody may run our code: an interpreter, and what it needs, under a path that is open to all."""

    directory: Path
    python: Path
    environment: Mapping[str, str]

    def command(self, uid: int, capabilities: Sequence[str], *words: str) -> list[str]:
        return as_user(uid, capabilities, [str(self.python), *words])


def as_user(uid: int, capabilities: Sequence[str], command: list[str]) -> list[str]:
    """`command` as this user, with exactly these capabilities."""
    chosen = ",".join(["-all", *(f"+{each}" for each in capabilities)])
    rights = [f"--inh-caps={chosen}", f"--ambient-caps={chosen}", f"--bounding-set={chosen}"]
    who = [f"--reuid={uid}", f"--regid={group_of(uid)}", "--clear-groups", "--no-new-privs"]
    return ["setpriv", *who, *rights, "--", *command]


def group_of(uid: int) -> int:
    """The user's own group, as Slurm checks it of the user who starts a step; a group of that number for an unknown user."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


def parts_of_a_place() -> dict[str, Path]:
    """What has to be bound below a Place's directory, by name."""
    packages = next(path for path in site.getsitepackages() if (Path(path) / "msgspec").is_dir())
    return {"python": Path(sys.base_prefix), "packages": Path(packages), "checkout": CHECKOUT}


def furnish(directory: Path) -> Place:
    """The place in `directory`, whose parts are bound there, or will be."""
    tools = directory / "tools"
    tools.mkdir(mode=0o755)
    shutil.copy(Path(sys.executable).with_name("py-spy"), tools)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{directory}/checkout/watchdog:{directory}/checkout:{directory}/packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        # An interpreter with a shared library finds it by a path that this user may not enter, and would take
        # the system's older one.
        "LD_LIBRARY_PATH": f"{directory}/python/lib",
    }
    python = directory / "python" / "bin" / f"python{sysconfig.get_python_version()}"
    return Place(directory, python, environment)


def bind_parts(directory: Path) -> None:
    """Binds the parts of the place in `directory`, to be read only: whatever removes this directory. Raises
    CalledProcessError."""
    for name, source in parts_of_a_place().items():
        (directory / name).mkdir()
        subprocess.run(["mount", "--bind", source, directory / name], check=True, timeout=20)
        subprocess.run(["mount", "-o", "remount,bind,ro", directory / name], check=True, timeout=20)


_PROGRAM = """\
#!/bin/sh
export LD_LIBRARY_PATH={library} TMPDIR=/dev/shm
exec {python} -c "
import sys
sys.path[:0] = {paths}
from slurm_watchdog.cli.main import main
sys.argv[0] = 'slurm-watchdog'
main()" "$@"
"""


def own_program(place: Place, directory: Path) -> Path:
    """`slurm-watchdog` as a job's user has it installed: a program in `directory`. What it starts finds no packages of ours
    in its environment; TMPDIR, because /tmp may be root's alone where the rig is."""
    path = directory / "slurm-watchdog"
    text = _PROGRAM.format(
        library=place.environment["LD_LIBRARY_PATH"],
        python=place.python,
        paths=place.environment["PYTHONPATH"].split(":"),
    )
    path.write_text(text)
    path.chmod(0o755)
    return path


def ensure_user(name: str, uid: int) -> None:
    """Makes the user who submits jobs here, and who cannot log in: nothing is read, written or signalled as
    root, nor as `nobody`."""
    with contextlib.suppress(KeyError):
        pwd.getpwnam(name)
        return
    command = [
        "useradd",
        "--no-create-home",
        "--home-dir=/nonexistent",
        "--shell=/bin/sh",
        f"--uid={uid}",
        "--user-group",
        name,
    ]
    subprocess.run(command, capture_output=True, check=False)  # another cluster may have been faster
    pwd.getpwnam(name)


def agent_command(where: Place, *words: str) -> list[str]:
    """`slurm-watchdog agent …`, as its user with its capabilities."""
    program = "import sys; from slurm_watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
    return where.command(AGENT_UID, CAPABILITIES, "-c", program, "agent", *words)
