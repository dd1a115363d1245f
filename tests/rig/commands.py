"""Commands of the rig: run with a deadline, as a user, and what is printed where one fails."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.rig.patience import Patience, busyness


class ClusterError(Exception):
    """Something about the cluster did not work. The text says what, where, and what to do next."""


def commit() -> str:
    """What is checked out here, short; `+` behind it: with changes. Empty outside of a repository."""
    argv = ("git", "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*")
    done = subprocess.run(argv, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def search_path() -> str:
    """PATH with the directories of the administrator's commands, which a user's PATH lacks."""
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float = 30,
    check: bool = True,
    user: str | None = None,
    **options,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end, as `user` if given, and return its exit code and text. Raises ClusterError."""
    command = [*as_user(user), *map(str, argv)]
    shown = shlex.join(command)
    options.setdefault("env", os.environ | {"PATH": search_path()})
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s * busyness(), **options
        )
    except FileNotFoundError as error:
        raise ClusterError(f"cannot run {shown}: {error}; call ensure_packages() first") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"no answer within {timeout_s:g} s from: {shown}") from error
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "it printed nothing"
        raise ClusterError(f"exit code {done.returncode} from: {shown}\n{said}")
    return done


def as_user(user: str | None, *more: str) -> list[str]:
    """The words to put before a command so that it runs as `user` (None: as we are); `more` are setpriv options."""
    if user is None:
        return ["setpriv", *more] if more else []
    entry = pwd.getpwnam(user)
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups", *more]


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log file with its name above, or a remark that there is none."""
    try:
        text = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return f"--- {path}: {error.strerror}"
    return "\n".join([f"--- last lines of {path}", *text])


def wait_until(condition: Callable[[], object], timeout_s: float, interval_s: float = 0.05) -> bool:
    """Ask again and again until `condition()` is true; False if it was not within `timeout_s` of an idle machine."""
    patience = Patience(timeout_s)
    while not condition():
        if not patience.lasts():
            return False
        time.sleep(interval_s)
    return True
