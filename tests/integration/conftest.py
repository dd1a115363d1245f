"""Real parts for integration tests: `cluster` is a Slurm cluster of three nodes, shared by all tests of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rig.cluster import Cluster, ClusterError, ensure_packages, why_impossible


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
