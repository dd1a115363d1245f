"""The runs (`run`, `attach`) that a person has started: a small file each in `$XDG_STATE_HOME/slurm-watchdog/runs`, so
that other commands find them without --socket. Machines may share it: a run lives if its socket answers here."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

MAX_RUNS = 50  # Files that are kept; those of older runs are deleted, the runs' directories stay.
CONNECT_S = 1.0
NO_HOME = Path("/nonexistent")
JOURNAL = "journal.sqlite"
SOCKET = "controller.sock"
PASSWORD_FILE = "page-password"  # noqa: S105 -- a file's name
ABSENT = (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, PermissionError)


@dataclass(frozen=True)
class OwnRun:
    """One `run` or `attach`."""

    command: str  # `run` or `attach`.
    what: str  # The command line, or the job.
    directory: str
    host: str
    started_at: float  # Date.
    ended_at: float | None = None  # Date; None while it runs, and for one that was killed.

    @property
    def socket(self) -> str:
        """Where its controller answers, on its host."""
        return str(Path(self.directory) / SOCKET)


def home_directory() -> Path:
    """The user's home directory; one that does not exist for a user without any, such as a number in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return NO_HOME


def state_home(home: Path, environ: Mapping[str, str]) -> Path:
    """The person's directory for what programs remember (XDG base directories), ours in it."""
    return Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "slurm-watchdog"


def write_run(place: Path, run: OwnRun) -> None:
    """Writes a run down, or that it has ended. Below `place`, see state_home. What fails is logged: the run
    is watched all the same."""
    directory = place / "runs"
    name = f"{run.started_at:.3f}-{run.host}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = directory / f".{name}.{os.getpid()}"
        new.write_bytes(msgspec.json.encode(run))
        new.replace(directory / name)
        for old in sorted(directory.glob("*.json"))[:-MAX_RUNS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        if run.ended_at is not None:
            return  # it was said at the start
        import logging

        log = logging.getLogger(__name__)
        log.warning("`slurm-watchdog status` will not find this run without --socket: %s", error)


def read_runs(place: Path) -> list[OwnRun]:
    """Every run that is remembered, the newest first; what is no such file is left out."""
    found = []
    for file in (place / "runs").glob("[!.]*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(file.read_bytes(), type=OwnRun))
    return sorted(found, key=lambda run: run.started_at, reverse=True)


def is_absent(path: str) -> bool:
    """Whether surely nothing that this user may ask listens on a socket; one that is slow to answer is there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(path)
        except ABSENT:
            return True
        except OSError as error:
            return "too long" in str(error)
    return False


def running_runs(place: Path) -> list[OwnRun]:
    """The runs whose controllers answer on this machine, the newest first."""
    found = {run.directory: run for run in reversed(read_runs(place)) if run.ended_at is None}
    return [run for run in reversed(found.values()) if not is_absent(run.socket)]


def ended_runs(place: Path) -> list[OwnRun]:
    """The runs that have ended and left a journal, the newest first; one that was killed is among them."""
    found = {run.directory: run for run in reversed(read_runs(place)) if Path(run.directory, JOURNAL).is_file()}
    killed = [run for run in found.values() if run.ended_at is None and run.host == socket.gethostname()]
    gone = [run for run in killed if is_absent(run.socket)]
    return [run for run in reversed(found.values()) if run.ended_at is not None or run in gone]
