"""A small program that becomes a user and turns into sbatch: `python -I submit_as_user.py UID SBATCH ARGUMENT…`.

The job script on its standard input is sbatch's. Looking a user up may wait for a directory server that does not
answer; here that stops a process with a deadline, and not the controller. Standard library only. Ends with 120 if it
can't become that user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys

CANNOT = 120  # Exit code of our own, none of sbatch's.
OURS = ("SLURM_CONF", "SLURM_CONF_SERVER")  # Where this cluster is.


def main(argv: list[str]) -> int:
    """Becomes the user and does not return, or says why not."""
    uid, command, arguments = int(argv[1]), argv[2], argv[3:]
    try:
        user = pwd.getpwuid(uid)
        path = shutil.which(command)
        if path is None:
            raise FileNotFoundError(f"there is no {command}")
        if uid != os.geteuid():
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(uid)
        environ = {name: os.environ[name] for name in OURS if name in os.environ}
        environ |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
        os.execve(path, [command, *arguments], environ | {"PATH": "/usr/local/bin:/usr/bin:/bin"})  # noqa: S606
    except (OSError, KeyError) as error:
        sys.stderr.write(f"submitting as user {uid} is not possible: {error}\n")
        return CANNOT


if __name__ == "__main__":
    sys.exit(main(sys.argv))
