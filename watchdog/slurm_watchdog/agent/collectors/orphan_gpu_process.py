"""Processes that hold a GPU without a job: see slurm_watchdog.agent.gpu.orphan_processes, which finds them.

Sees: processes that hold a GPU and belong to no job that Slurm has here
From: NVML's lists, links to `/dev/nvidiaN` in `/proc/PID/fd`
How often: 96 links a tick, each process every 30 s; reported after `agent.orphan_grace`
Never: ends a process; suspects a known daemon, or a process of root that came from no job
"""

from __future__ import annotations

from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec
from slurm_watchdog.model.report import GpuSection, OrphanGpuProcessSection


class OrphanGpuProcessCollector(Collector):
    """Who holds a GPU outside of running jobs."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self.keeper = self._holders = context.orphan_gpu_processes

    def collect(self, now: float) -> OrphanGpuProcessSection:
        """The longest first."""
        gpus = self.sections.of(GpuSection).gpus
        table, ours = self.context.processes.table.entries, self.context.processes.ours
        return OrphanGpuProcessSection(
            gpu_holders=self._holders.collect(now, table, ours, gpus, self.context.jobs.running(now))
        )


SPEC = CollectorSpec("orphan_gpu_process", OrphanGpuProcessSection, OrphanGpuProcessCollector)
