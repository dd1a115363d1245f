"""A real accounting database for a cluster of the rig: MariaDB on a socket of its own, and slurmdbd.

Needs Debian's packages `mariadb-server` and `slurmdbd` (or another release's slurmdbd on PATH). Everything lies below the
cluster's directory, and ends with the cluster.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.rig.commands import ClusterError, run_command, search_path, tail, wait_until

PACKAGES = ("mariadb-server", "slurmdbd")
START_S = 60.0
DIES_WITH_US = ("setpriv", "--pdeathsig=KILL")
"""What is left of a dead owner is found by its command line, and theirs do not name the cluster."""
Spawn = Callable[[str, Sequence[str]], subprocess.Popen]


def why_impossible() -> str | None:
    """Which command is missing, and the packages that bring it."""
    missing = [
        name for name in ("mariadbd", "mariadb-install-db", "slurmdbd") if not shutil.which(name, path=search_path())
    ]
    return (
        f"not there: {', '.join(missing)}; apt-get install --no-install-recommends {' '.join(PACKAGES)}"
        if missing
        else None
    )


def settings(directory: Path, index: int) -> Mapping[str, str]:
    """What slurm.conf has to say of it."""
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "localhost",
        "AccountingStoragePort": str(15000 + index),
        "AccountingStoragePass": f"{directory}/munge/socket",
        "JobAcctGatherType": "jobacct_gather/linux",
    }


def socket_of(directory: Path) -> Path:
    """MariaDB's, of the cluster in this directory."""
    return directory / "database/socket"


def start(directory: Path, index: int, spawn: Spawn, env: Mapping[str, str]) -> None:
    """Starts both, and adds the cluster. munged has to run. Raises ClusterError."""
    if (reason := why_impossible()) is not None:
        raise ClusterError(reason)
    place = directory / "database"
    place.mkdir()
    data = [f"--datadir={place}/data", "--user=root"]
    run_command(["mariadb-install-db", "--no-defaults", *data, "--skip-test-db"], timeout_s=START_S)
    small = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0"]
    process = spawn(
        "mariadbd",
        [
            *DIES_WITH_US,
            "mariadbd",
            "--no-defaults",
            *data,
            *small,
            f"--socket={socket_of(directory)}",
            "--skip-networking",
        ],
    )
    _await(lambda: socket_of(directory).exists(), process, directory / "log/mariadbd.out")
    configuration = directory / "slurmdbd.conf"
    configuration.touch(mode=0o600)
    configuration.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={directory}/munge/socket\nDbdHost=localhost\nDbdPort={15000 + index}\n"
        f"SlurmUser=root\nLogFile={directory}/log/slurmdbd.log\nPidFile={place}/slurmdbd.pid\n"
        "StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser=root\n"
    )
    process = spawn("slurmdbd", [*DIES_WITH_US, "env", f"MYSQL_UNIX_PORT={socket_of(directory)}", "slurmdbd", "-D"])

    def answers() -> bool:
        command = ["sacctmgr", "--immediate", "add", "cluster", f"demo{index}"]
        return run_command(command, check=False, env=dict(env)).returncode == 0

    _await(answers, process, directory / "log/slurmdbd.log")


def _await(ready: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    """Until it is ready. Raises ClusterError if it ends before, or takes too long."""
    if not wait_until(lambda: process.poll() is not None or ready(), START_S, 0.2) or process.poll() is not None:
        raise ClusterError(f"{log.stem} did not start\n{tail(log)}")


def query(directory: Path, statement: str) -> str:
    """Asks, or changes, the database itself: what takes a month otherwise."""
    command = ["mariadb", "--no-defaults", f"--socket={socket_of(directory)}", "--batch", "slurm_acct_db"]
    return run_command(command, input=statement).stdout
