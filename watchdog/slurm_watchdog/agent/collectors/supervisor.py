"""Supervisors (`slurm-watchdog run` in a batch script) of the jobs whose batch host this node is.

Sees: that a job has one, the step and nodes of its command, its spare nodes, what became of the last order
From: its connection to the agent's socket
How often: as it says so: at each change, and every 5 s
Never: believes more of it than what concerns the job of its sender
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.agent.collectors.collector import Collector, CollectorSpec, Problem
from slurm_watchdog.model.report import SupervisorSection


class SupervisorCollector(Collector):
    """The newest status of each supervisor."""

    def collect(self, now: float) -> SupervisorSection:
        """Of every job that has one."""
        return SupervisorSection(supervisors=tuple(self.context.supervisors.tick(now)))

    def problems(self, now: float) -> Iterable[Problem]:
        """Why none can connect."""
        if problem := self.context.supervisors.problem:
            yield Problem(problem, failed=False)


SPEC = CollectorSpec("supervisor", SupervisorSection, SupervisorCollector)
