"""Debian packages that only tests need. `python -m tests.integration.packages` installs them all at once, as
CI does."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = {  # what a test wants -> commands, and the packages that bring them
    "Prometheus": (
        ("prometheus", "promtool", "prometheus-alertmanager", "amtool"),
        ("prometheus", "prometheus-alertmanager"),
    ),
    "systemd-nspawn": (("systemd-nspawn", "debootstrap"), ("systemd-container", "debootstrap")),
    "Chromium": (("chromium",), ("chromium",)),
    "Open MPI": (("mpirun",), ("openmpi-bin",)),
    "Exim": (("exim4",), ("exim4-daemon-light",)),
    "PostgreSQL": (("pg_ctlcluster",), ("postgresql",)),
    "rpmbuild": (("rpmbuild", "rpm"), ("rpm",)),
}
INSTALL = ["apt-get", "install", "-y", "--no-install-recommends"]
ATTEMPTS = 2
"""A mirror that is busy for a moment is no reason for a failed run."""


def missing(names: list[str]) -> list[str]:
    """The packages of these rows of which a command is not there."""
    wanted = [PACKAGES[name] for name in names]
    return [package for commands, packages in wanted if not all(map(shutil.which, commands)) for package in packages]


def install(names: list[str]) -> str:
    """Installs what these rows lack; returns "" or why that failed. One at a time: apt refuses to run beside
    another."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = missing(names)
        if not packages:
            return ""
        error = ""
        for _ in range(ATTEMPTS):
            for command in (["apt-get", "-qq", "update"], [*INSTALL, "-qq", *packages]):
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
                error = "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr[-500:]}"
            if not error:
                break
    return error


def ensure(name: str) -> None:
    """Installs the packages of a row in CI; elsewhere the test is skipped without them, with what to type."""
    packages = missing([name])
    if not packages:
        return
    if os.environ.get("CI", "").lower() not in {"1", "true"} or os.geteuid() != 0:
        pytest.skip(f"no {name} here: {' '.join([*INSTALL, *packages])}")
    if error := install([name]):
        pytest.fail(error, pytrace=False)


if __name__ == "__main__":
    sys.exit(install(list(PACKAGES)) or 0)
