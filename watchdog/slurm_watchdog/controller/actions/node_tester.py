"""Tests nodes for the controller as `test-nodes --drained-by-us` does for a person, by the controller's own user."""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.ports.node_tests import NotTested
from slurm_watchdog.model.node_test import NodeTest, NodeVerdict
from slurm_watchdog.nodetest.conduct import Terms, conduct
from slurm_watchdog.nodetest.drained import lifted
from slurm_watchdog.nodetest.jobs import Placement, Salloc
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.commands import Commands
from slurm_watchdog.slurm.reservation import Reservations

log = logging.getLogger(__name__)

CLEANUP_S: Final = 120.0
"""Of the test's time, in which nodes are drained again."""


class SlurmTester:
    """See the module. What a controller that is killed has left is known from the journal."""

    def __init__(self, config: Config, client: SlurmClient) -> None:
        self._config, self._client = config, client

    async def test(self, asked: NodeTest) -> Sequence[NodeVerdict]:
        """As NodeTester has it."""
        client, tests = self._client, self._config.node_tests
        commands = Commands(self._config.slurm.bin_directory, os.environ)
        placement = Placement(
            comment=f"slurm-watchdog test-nodes of the controller {asked.name}", program=tests.program,
            reservation=asked.name,
        )  # fmt: skip
        terms = Terms(
            words=tuple(tests.options), floors=tests.floors, cluster=self._config.cluster_name,
            place=Path(self._config.controller.state_directory),
        )  # fmt: skip
        try:
            async with timeout(asked.until - CLEANUP_S - clock.wall()):
                found = [await client.read_node(name) for name in (*asked.nodes, *asked.peers)]
                nodes = [node for node in found if node is not None]
                reservations = Reservations(commands, getpass.getuser())
                async with lifted(client, reservations, nodes, asked.name, None, log.warning):
                    return (await conduct(nodes, terms, Salloc(client, commands, placement), log.info)).verdicts
        except TimeoutError:
            raise NotTested("it did not end in time") from None
        except (SlurmUnavailable, SlurmRefused, OSError, KeyError) as error:
            raise NotTested(str(error)) from error
        raise AssertionError("an exit lets each exception pass")
