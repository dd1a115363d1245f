"""Certificates for tests, made by the authority that sites use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slurm_watchdog.identity import certificate_authority
from slurm_watchdog.identity.secret_files import TlsFiles

DAY_S = 86400.0


def make_authority(place: Path, now: float) -> Path:
    """An authority in `place`, ten years old at most, and a controller of 127.0.0.1."""
    certificate_authority.create(place, "tests", 3650, now - 1000 * DAY_S)
    certificate_authority.issue(place, "controller", "localhost", ("127.0.0.1",), 397, now)
    return place


def node_files(ca: Path, name: str, now: float, days: int = 30) -> TlsFiles:
    """The folder of a node whose certificate was made at `now`."""
    return TlsFiles(certificate_authority.issue(ca, "node", name, (), days, now).directory, "agent")


def controller_files(ca: Path) -> TlsFiles:
    return TlsFiles(str(ca / "controllers" / "localhost"), "controller")


def replace_files(there: TlsFiles, by: TlsFiles) -> None:
    """As somebody does who copies renewed certificates to a machine."""
    for old, new in zip(there.all(), by.all(), strict=True):
        shutil.copy(new, old + ".new")
        os.replace(old + ".new", old)
