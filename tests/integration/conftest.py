"""Real parts for integration tests: `cluster` is a Slurm cluster of three nodes, shared by all tests of a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.silent_server import Silent, mounted
from tests.rig.cluster import Cluster
from tests.rig.commands import ClusterError
from tests.rig.debian_packages import ensure_packages, why_impossible
from tests.rig.stack import Watchdog


@pytest.fixture(scope="session")
def cluster_possible() -> None:
    """Skip where no cluster can be made, with the reason; tests/conftest.py turns a skip into a failure in CI."""
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        try:
            ensure_packages()
        except ClusterError as error:
            pytest.fail(str(error), pytrace=False)
    reason = why_impossible()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster_of_the_run(cluster_possible: None) -> Iterator[Cluster]:
    """One cluster from the first test that wants it to the last one."""
    with Cluster(nodes=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_of_the_run: Cluster) -> Iterator[Cluster]:
    """The cluster n1, n2, n3: all idle, nothing broken, no job, no file. What a test breaks is mended after it."""
    yield cluster_of_the_run
    cluster_of_the_run.reset()


@pytest.fixture
def watch(cluster: Cluster) -> Iterator[Callable[..., Watchdog]]:
    """Starts a watchdog on the cluster; stops it after the test."""
    started: list[Watchdog] = []

    def start(**options: Any) -> Watchdog:
        watchdog = Watchdog(cluster, **options)
        started.append(watchdog)
        return watchdog.__enter__()

    yield start
    for watchdog in started:
        watchdog.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can pass through, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="watchdog-mounts-", ignore_cleanup_errors=True) as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.fixture
def fuse(place: Path) -> Iterator[Silent]:
    """A filesystem whose server can be silenced."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse here")
    with mounted(place / "fuse") as silent:
        yield silent
