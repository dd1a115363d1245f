"""`slurm-watchdog test-nodes` on a cluster of the rig, as an ordinary user runs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.rig.cluster import Cluster
from tests.rig.commands import as_user
from tests.rig.rights import USER, own_program


class TestedNodes:
    """The program and a home for one user on one cluster."""

    __test__ = False

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.home = cluster.shared / "home"
        self.home.mkdir(exist_ok=True)
        self.home.chmod(0o777)
        self.program = own_program(cluster.place, cluster.shared)

    def popen(self, *options: str, user: str | None = USER, **more: Any) -> subprocess.Popen[str]:
        """As `sudo -u USER slurm-watchdog test-nodes …`; None: as root."""
        name = user or "root"
        environment = self.cluster.env | {"HOME": str(self.home), "USER": name, "LOGNAME": name}
        command = [*as_user(user), str(self.program), "test-nodes", *options]
        return subprocess.Popen(command, env=environment, cwd="/", text=True, **more)

    def run(self, *options: str, timeout_s: float = 170, user: str | None = USER) -> tuple[int, dict[str, Any]]:
        """Exit code and document of `--json`; raises ValueError with what it printed where that is none."""
        with self.popen(*options, "--json", user=user, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        try:
            return process.returncode, json.loads(output)
        except ValueError as error:
            raise ValueError(f"code {process.returncode}\n{output[-500:]}\n{errors[-2000:]}") from error

    def quick(self, *more: str) -> Sequence[str]:
        """Options of a short test of all nodes, one after the other: they share one machine."""
        scratch = Path(self.cluster.scratch)
        short = ("--at-once", "1", "--seconds", "0.4", "--local", str(scratch), "--shared", str(self.cluster.shared))
        return (*self.cluster.nodes, *short, *more)


def bad_nodes(document: dict[str, Any]) -> list[str]:
    """Those that it names."""
    return [each["node"] for each in document["verdicts"] if each["truth"] == "bad"]
