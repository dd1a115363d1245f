"""Reads whether the controller and the helper's socket answer, and whether the certificates can be used."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from slurm_watchdog.base import clock
from slurm_watchdog.doctor.deadline import DEADLINE_S, run
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.identity.tls import make_context, read_expiry

OTHERS: Final = stat.S_IRWXO | stat.S_IWGRP
"""What nobody may do with a secret but its owner, and its group that reads it."""
MAX_ANSWER: Final = 8 << 20
TIME: Final = re.compile(r'"time":([0-9.]+(?:[eE][0-9]+)?)')
"""In the answer of /healthz. Its metrics would say it, too, and cost it a thousand times as much: all nodes
may ask in one moment, where doctor is Slurm's HealthCheckProgram."""


def read_controller(url: str, files: TlsFiles | None) -> tuple[str | None, float | None]:
    """(why the controller gives no answer at all, how far our clock is ahead of its); one that says it is not
    well was reached.

    A controller of a release before that does not say its time.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    connection: http.client.HTTPConnection
    try:
        if parts.scheme == "https":
            context = make_context(files, server=False) if files is not None else None
            connection = http.client.HTTPSConnection(host, port, timeout=DEADLINE_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
    except IdentityError:
        return None, None  # the certificates have a finding of their own
    try:
        connection.request("GET", "/healthz")
        text = connection.getresponse().read(MAX_ANSWER).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__, None
    finally:
        connection.close()
    match = TIME.search(text)
    return None, None if match is None else clock.wall() - float(match[1])


def read_certificates(files: TlsFiles) -> tuple[str | None, int | None]:
    """(why they can't be used, days until the first of them ends)."""
    try:
        make_context(files, server=files.service == "controller")
        ends = min(read_expiry(files).values())
    except IdentityError as error:
        return str(error), None
    return None, int((ends - clock.wall()) // 86400)


def read_open_secret(paths: Iterable[str]) -> str | None:
    """Which of these files others than owner and group may read or change, the first of them; None: none, or none that
    can be seen from here."""
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_IMODE(os.stat(path).st_mode) & OTHERS:
                return f"{path} (mode {stat.S_IMODE(os.stat(path).st_mode):04o})"
    return None


def read_helper_problem(path: str) -> str | None:
    """Why the helper's socket does not answer; None: it does, or the agent here runs as root and needs none."""
    if not path or not Path("/run/systemd/system").is_dir():
        return None
    code, said = run(["systemctl", "show", "--property=LoadState,User", "slurm-watchdog-agent.service"])
    values = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    if code != 0 or values.get("LoadState") != "loaded" or values.get("User", "") in ("", "root", "0"):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(DEADLINE_S)
        try:
            probe.connect(path)
        except PermissionError:
            return None  # it is there; only its agent may speak to it
        except OSError as error:
            return f"{path}: {error.strerror or error}"
    return None
