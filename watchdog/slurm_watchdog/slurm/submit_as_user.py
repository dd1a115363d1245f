"""A small program that becomes a user and turns into sbatch: `python -I submit_as_user.py UID SBATCH ARGUMENT…`.

On its standard input stand the length of what follows in eight digits, that many bytes of JSON (the job's
environment, or null for a login's), and the job script, which is left for sbatch. The environment is not ours
until we are that user: a user's LD_PRELOAD must not be root's. Looking a user up may wait for a directory
server that does not answer; here that stops a process with a deadline, and not the controller. Standard
library only. Ends with 120 if it can't become that user.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys

CANNOT = 120
"""Exit code of our own, none of sbatch's."""
OURS = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""Where this cluster is; the job's own environment may speak of another one."""


def main(argv: list[str]) -> int:
    """Becomes the user and does not return, or says why not."""
    uid, command, arguments = int(argv[1]), argv[2], argv[3:]
    given = json.loads(read_exactly(int(read_exactly(8))))
    try:
        user = pwd.getpwuid(uid)
        path = shutil.which(command)
        if path is None:
            raise FileNotFoundError(f"there is no {command}")
        if uid != os.geteuid():
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(uid)
        kept = {name: os.environ[name] for name in OURS if name in os.environ}
        login = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
        login["PATH"] = "/usr/local/bin:/usr/bin:/bin"
        if given is None:
            arguments = ["--get-user-env", *arguments]
        os.execve(path, [command, *arguments], (login if given is None else given) | kept)  # noqa: S606
    except (OSError, KeyError) as error:
        sys.stderr.write(f"submitting as user {uid} is not possible: {error}\n")
        return CANNOT


def read_exactly(size: int) -> bytes:
    """`size` bytes of standard input and not one more: the rest is sbatch's. Raises EOFError."""
    parts = b""
    while len(parts) < size:
        part = os.read(0, size - len(parts))
        if not part:
            raise EOFError("standard input ends too early")
        parts += part
    return parts


if __name__ == "__main__":
    sys.exit(main(sys.argv))
