"""What owners of jobs want of the watchdog, from the environment of their processes.

Sees: what a job asks of the watchdog: [what a job's owner may say](acting.md#what-a-jobs-owner-may-say)
From: `SLURM_WATCHDOG…` in the environment of its processes, as the child read it for `process`
How often: every tick; four variables of 1024 characters
Never: a permission: it can only take away
"""

from __future__ import annotations

from slurm_watchdog.agent.collectors.collector import Collector, CollectorSpec
from slurm_watchdog.model.report import DirectiveSection


class JobDirectiveCollector(Collector):
    """Reads no process itself: takes what was read of it when it was met."""

    def collect(self, now: float) -> DirectiveSection:
        """Of every job that has any."""
        return DirectiveSection(wishes=self.context.processes.directives())


SPEC = CollectorSpec("job_directives", DirectiveSection, JobDirectiveCollector)
