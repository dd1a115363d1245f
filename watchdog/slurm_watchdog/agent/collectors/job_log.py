"""Logs of the jobs on this node: see slurm_watchdog.agent.logs.job_logs, which has them followed.

Sees: steps, losses, step times, phases, checkpoints, errors; rotation, truncation, carriage returns, broken
    UTF-8, a flood
From: standard output and error (on the batch host), logs that ranks have open, `agent.log_patterns`
How often: every tick; 24 files a job, 32 MiB or 0.25 s of a core a look; behind by more than 256 MiB it
    skips, and counts what
Never: a log as root: the child becomes the job's owner
"""

from __future__ import annotations

from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec
from slurm_watchdog.knowledge.launchers import HEARTBEAT_VARIABLE
from slurm_watchdog.model.report import LogSection, ProcessSection


class JobLogCollector(Collector):
    """Which files there are, how far each was read, and what they say."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self.keeper = self._logs = context.logs

    def collect(self, now: float) -> LogSection:
        """What happened in the logs of all jobs that have processes here, or are watched."""
        processes = self.sections.of(ProcessSection).processes
        jobs = {process.job_id for process in processes} | set(self._logs.jobs)
        known = self.context.processes
        environs = {each: {**known.environ_of(each), HEARTBEAT_VARIABLE: known.heartbeat_of(each)} for each in jobs}
        rows, events, dropped = self._logs.collect(now, processes, environs, self.deadline_s)
        return LogSection(logs=rows, events=events, events_dropped=dropped)


SPEC = CollectorSpec("job_log", LogSection, JobLogCollector)
