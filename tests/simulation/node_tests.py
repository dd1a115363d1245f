"""Stands in for test-nodes in the simulated cluster: it takes minutes, finds most of the nodes that are slow, is sometimes
of no use, and ends with the controller that has started it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from slurm_watchdog.controller.ports.node_tests import NotTested
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_test import NodeResult, NodeTest
from tests.simulation.cluster import Cluster

FINDS, FAILS = 0.8, 0.1
"""Share of the slow nodes that a test names, and of the tests that come to nothing."""


class SimTester:
    """Of one life of the controller."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng

    async def test(self, asked: NodeTest) -> Sequence[NodeResult]:
        self._cluster.deed("us", "test begins", detail=",".join(asked.nodes))
        await asyncio.sleep(self._rng.uniform(20.0, 300.0))
        self._cluster.deed("us", "test ends", detail=",".join(asked.nodes))
        if self._rng.random() < FAILS:
            raise NotTested("sbatch does not answer")
        return [self._result(node) for node in asked.nodes]

    def _result(self, node: str) -> NodeResult:
        if node in self._cluster.slow_nodes and self._rng.random() < FINDS:
            return NodeResult(node=node, truth=Truth.BAD, faults=(("memory", "it is slower than its peers"),))
        return NodeResult(node=node, truth=Truth.OK, peers=4, measured=("cpu", "memory"))
