"""A command of `run` that has several nodes of a job: where each start goes, and the end of its steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slurm_watchdog.supervisor.allocation import Allocation
from slurm_watchdog.supervisor.launcher import Launcher
from slurm_watchdog.supervisor.placement import NoSpare, Placement, choose

log = logging.getLogger(__name__)


class PlacedCommand:
    """What `LocalSlurm` asks where its command is not of one machine alone."""

    def __init__(self, launcher: Launcher, allocation: Allocation, count: int, least: int):
        """`count`: nodes of a start; `least`: as few as it can be. Raises NoSpare where the job has too few."""
        self.launcher, self._allocation, self._count, self._least = launcher, allocation, count, least
        self._placement: Placement = choose(allocation, count)
        self._avoided: set[str] = set()

    async def prepare(self, starts: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """The command and its environment on the nodes that look best; `starts`: how often it was started before."""
        usable = [node for node in self._allocation.nodes if node not in self._avoided]
        suspects = await self.launcher.look(usable, len(usable) - self._count)
        self._placement = choose(
            self._allocation, self._count, avoided=self._avoided, suspects=suspects.keys(),
            previous=self._placement.nodes,
        )  # fmt: skip
        for node, why in suspects.items():
            used = "is used all the same, for no spare is left" if node in self._placement.nodes else "is left out"
            log.warning("%s %s: %s", node, used, why)
        return self.launcher.command_line(self._placement), await self.launcher.environment(self._placement, starts)

    @property
    def is_elastic(self) -> bool:
        """Whether it can run on fewer nodes than it has."""
        return self._least < self._count

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the present start."""
        return self._placement.nodes

    def leave_out(self, nodes: Sequence[str]) -> str:
        """Starts the command on these nodes no more; why it cannot be started on the others, empty: it can be."""
        self._avoided |= set(nodes)
        self._count = min(self._count, max(self._least, len(self._allocation.nodes) - len(self._avoided)))
        try:
            choose(self._allocation, self._count, avoided=self._avoided)
        except NoSpare as error:
            return str(error)
        return ""

    async def signal_steps(self, name: str) -> None:
        """Sends a signal to the steps that the command has now."""
        await self.launcher.signal_steps(name, await self.launcher.find_steps() or self.launcher.steps)
