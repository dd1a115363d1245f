"""Who tests nodes for the controller, and who learns of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slurm_watchdog.model.node_test import NodeResult, NodeTest
    from slurm_watchdog.model.slow_search import JobSearch


class NotTested(Exception):
    """A test came to no results: why, a sentence."""


class NodeTester(Protocol):
    """Runs one test to its end."""

    async def test(self, asked: NodeTest) -> Sequence[NodeResult]:
        """Ends by `asked.until` at the latest. Cancelled, it ends the test's jobs. Raises NotTested."""
        ...


class NoTester:
    """Where nodes cannot be tested: a `run`, a replay."""

    async def test(self, asked: NodeTest) -> Sequence[NodeResult]:
        raise NotTested("this controller tests no nodes")


class TestedSearches(Protocol):
    """The searches for slow nodes, as far as tests concern them."""

    def all(self) -> tuple[JobSearch, ...]: ...

    def note_test(self, job_id: str, results: Sequence[NodeResult]) -> None:
        """What a test says of nodes that the job's run did not use."""
