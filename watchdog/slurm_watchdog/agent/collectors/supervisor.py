"""Supervisors (`slurm-watchdog run` in a batch script) of the jobs whose batch host this node is.

Sees: that a job has one, the step and nodes of its command, its spare nodes, what became of the last order
From: its connection to the agent's socket
How often: as it says so: at each change, and every 5 s
Never: believes more of it than what concerns the job of its sender
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.agent.collectors.collector import Collector, CollectorSpec, Family, Problem, job_label
from slurm_watchdog.model.report import Report, SupervisorSection
from slurm_watchdog.model.supervisor import FRESH_S


class SupervisorCollector(Collector):
    """The newest status of each supervisor."""

    def collect(self, now: float) -> SupervisorSection:
        """Of every job that has one."""
        return SupervisorSection(supervisors=tuple(self.context.supervisors.tick(now)))

    def problems(self, now: float) -> Iterable[Problem]:
        """Why none can connect."""
        if problem := self.context.supervisors.problem:
            yield Problem(problem, failed=False)


def metrics(report: Report) -> Iterable[Family]:
    """Whether one lives, and what it has left."""
    of_job = ("job_id",)
    alive = [((job_label(each.job_id),), each.age_s <= FRESH_S) for each in report.supervisors]
    yield Family("supervisor_up", "1 while the job's supervisor sends its status.", of_job, alive)
    spares = [((job_label(each.job_id),), len(each.status.spares)) for each in report.supervisors]
    yield Family("supervisor_spare_nodes", "Nodes of the job that wait as spares.", of_job, spares)
    starts = [((job_label(each.job_id),), each.status.starts) for each in report.supervisors]
    yield Family("supervisor_starts", "Starts of the job's command in this run.", of_job, starts)


SPEC = CollectorSpec("supervisor", SupervisorSection, SupervisorCollector, metrics)
