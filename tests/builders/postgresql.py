"""A PostgreSQL of a test's own, in a temporary directory, with a database for each that asks."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa


def server_directory() -> str:
    """Where the server's programs are; skips the test where there is none, or no driver (extra `postgresql`)."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("the driver psycopg is not installed: pip install 'slurm-training-watchdog[postgresql]'")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    server = str(found[-1].parent) if found else os.path.dirname(shutil.which("initdb") or "")
    if not server:
        pytest.skip("no PostgreSQL server is installed: apt-get install postgresql")
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no runuser")
    return server


@contextmanager
def postgresql_server() -> Iterator[Callable[[], str]]:
    """A running server; each call gives the address of an empty database of its own."""
    server = server_directory()
    directory = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # the path of its socket is short there
    as_user = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
    if as_user:
        shutil.chown(directory, "nobody")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    subprocess.run([*as_user, f"{server}/initdb", "-D", f"{directory}/data", "-U", "watchdog", "--auth=trust", "-N"],
                   check=True, capture_output=True, timeout=120, cwd="/")  # fmt: skip
    process = subprocess.Popen(
        [*as_user, f"{server}/postgres", "-D", f"{directory}/data", "-p", str(port), "-h", "127.0.0.1", "-k", str(directory)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    address = f"postgresql+psycopg://watchdog@127.0.0.1:{port}"
    numbers = itertools.count()

    def fresh() -> str:
        name = f"journal{next(numbers)}"
        engine = sa.create_engine(f"{address}/postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as sql:
            sql.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        return f"{address}/{name}"

    try:
        until = time.monotonic() + 60
        ready = [*as_user, f"{server}/pg_isready", "-h", "127.0.0.1", "-p", str(port), "-q"]
        while subprocess.run(ready, timeout=20, cwd="/").returncode:
            assert process.poll() is None and time.monotonic() < until, "PostgreSQL did not start"
            time.sleep(0.2)
        yield fresh
    finally:
        stop = [*as_user, f"{server}/pg_ctl", "stop", "-D", f"{directory}/data", "-m", "immediate"]
        subprocess.run(stop, capture_output=True, timeout=60, cwd="/")
        process.wait(30)
        shutil.rmtree(directory, ignore_errors=True)
