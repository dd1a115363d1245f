"""Who tests nodes for the controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slurm_watchdog.model.node_test import NodeTest, NodeVerdict


class NotTested(Exception):
    """A test came to no results: why, a sentence."""


class NodeTester(Protocol):
    """Runs one test to its end."""

    async def test(self, asked: NodeTest) -> Sequence[NodeVerdict]:
        """Ends by `asked.until` at the latest. Cancelled, it ends the test's jobs. Raises NotTested."""
        ...


class NoTester:
    """Where nodes cannot be tested: a `run`, a replay."""

    async def test(self, asked: NodeTest) -> Sequence[NodeVerdict]:
        raise NotTested("this controller tests no nodes")
