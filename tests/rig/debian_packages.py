"""Debian's packages of a local Slurm: which are missing, their installation, and why none can be made."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.rig.commands import ClusterError, run_command, search_path

PACKAGES = {  # Debian package -> commands that it brings
    "slurm-wlm": ("slurmctld", "slurmd", "sbatch", "scontrol"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "e2fsprogs": ("mkfs.ext4",),
    "util-linux": ("nsenter", "unshare", "setpriv", "mount"),
}


def missing_packages() -> list[str]:
    """Debian packages of PACKAGES of which a command is not there."""
    path = search_path()
    return [name for name, commands in PACKAGES.items() if not all(shutil.which(c, path=path) for c in commands)]


def ensure_packages(timeout_s: float = 300) -> None:
    """Install what is missing with apt-get, saying so. Raises ClusterError with the command to type if that fails."""
    missing = missing_packages()
    if not missing:
        return
    by_hand = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        raise ClusterError(f"missing: {', '.join(missing)}; as root: {by_hand}")
    if shutil.which("apt-get") is None:
        raise ClusterError(f"missing: {', '.join(missing)}, and there is no apt-get here; install them by other means")
    print(f"installing {', '.join(missing)} (at most {timeout_s:g} s) ...", file=sys.stderr, flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *missing]):
        try:
            run_command(command, timeout_s=timeout_s, env=environment)
        except ClusterError as error:
            raise ClusterError(f"{error}\ncould not install packages; try by hand: {by_hand}") from error


def why_impossible() -> str | None:
    """Why no cluster can be made on this machine, with what to do about it; None if one can."""
    if os.geteuid() != 0:
        return "a cluster needs root (namespaces, mounts, freezing a filesystem); run this as root"
    if missing := missing_packages():
        return f"not installed: {', '.join(missing)}; apt-get install --no-install-recommends {' '.join(missing)}"
    probe = "mount -t tmpfs none /mnt && ip link add swdprobe type veth peer name swdprobe1"
    try:
        run_command(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", probe])
    except ClusterError as error:
        return f"namespaces do not work here (in a container? it must be privileged): {error}"
    if not Path("/dev/loop-control").exists():
        return "no loop devices: /dev/loop-control is not there; modprobe loop, or run a privileged container"
    return None
