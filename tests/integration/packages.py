"""Debian packages that only tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest


def ensure(what: str, commands: Sequence[str], packages: Sequence[str]) -> None:
    """Installs `packages` in CI, if `commands` are not there; elsewhere the test is skipped, with what to type."""
    if all(shutil.which(command) for command in commands):
        return
    by_hand = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if os.environ.get("CI", "").lower() not in {"1", "true"} or os.geteuid() != 0:
        pytest.skip(f"no {what} here: {by_hand}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "-qq", "update"],
        ["apt-get", "-qq", "install", "-y", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            pytest.fail(f"{by_hand}: {done.stderr[-500:]}", pytrace=False)
