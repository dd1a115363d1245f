"""Controllers as processes on one PostgreSQL, each of a release of its own where a test wants that."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.cli.client import Client
from slurm_watchdog.cli.options import ClientError
from slurm_watchdog.model.documents import Paused, Status

PROGRAM = "from slurm_watchdog.cli.main import main; main()"


class Service:
    """One controller's process. Its Slurm does not answer."""

    def __init__(self, place: Path, tls: str, journal: str, release: str = ""):
        """`release`: the directory with the package; empty: this checkout."""
        place.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.release = release
        self.file, self.log, self.client = place / "config.yaml", place / "log", Client(str(place / "s"))
        self.file.write_text(
            f"controller: {{listen: '127.0.0.1:{self.port}', page_listen: '', socket: {place}/s, "
            f"state_directory: {place}/state, journal_url: '{journal}'}}\n"
            f"security: {{tls_directory: {tls}}}\nslurm: {{client: command_line, bin_directory: {place}}}\n"
        )
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as out:
            command = [*run_code(PROGRAM), "controller", "--config", str(self.file)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment_of(self.release))

    def end(self) -> int:
        """As systemd stops it; its exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def is_active(self) -> bool:
        try:
            self.client.get(Status, "/v1/status")
        except ClientError:
            return False
        return True

    def refusal(self) -> str:
        """What a command is answered here; empty while there is no answer."""
        try:
            self.client.post(Paused, "/v1/pause")
        except ClientError as error:
            return str(error) if error.code == "standby" else ""
        return ""


def environment_of(release: str) -> dict[str, str]:
    return dict(os.environ) | ({"PYTHONPATH": release} if release else {})


def seconds_until(holds: Callable[[], object], what: str, within_s: float = 60.0) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, what
        time.sleep(0.05)
    return time.monotonic() - began
