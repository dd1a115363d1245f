"""What owners of jobs want of the watchdog, from the environment of their processes."""

from __future__ import annotations

from slurm_watchdog.agent.collectors.collector import CollectorContext, CollectorSpec
from slurm_watchdog.model.report import DirectiveSection


class JobDirectiveCollector:
    """Reads no process itself: takes what was read of it when it was met."""

    def __init__(self, context: CollectorContext):
        self._reader = context.processes

    def collect(self, now: float) -> DirectiveSection:
        """Of every job that has any."""
        return DirectiveSection(wishes=self._reader.directives())


SPEC = CollectorSpec("job_directives", DirectiveSection, JobDirectiveCollector)
