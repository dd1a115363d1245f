"""Processes of all jobs on this node, in every tick: see slurm_watchdog.agent.processes.reader, which reads them.

Sees: job, step, rank, local rank, world size (torchrun, srun, Open MPI, MPICH, DeepSpeed and others),
    DataLoader workers, containers; state and for how long; a thread that stays in one system call, with
    file and mount; CPU time, I/O; how long main threads of ranks slept
From: `/proc`: `stat`, `status`, `schedstat`, `cgroup`, `io`, `wchan`, `syscall`, links in `fd`
How often: every tick (5 s), helpers every third; other threads than the main ones once in 12 ticks, at most 192 a
    tick, those of a process that gives cause every 3 ticks
Never: anything but `status`, `schedstat` and `cgroup` in the loop: the rest may block behind a process that
    hangs. A child that is its user reads it
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.agent.collectors.collector import (
    Collector,
    CollectorContext,
    CollectorSpec,
    Problem,
)
from slurm_watchdog.model.report import ProcessSection


class ProcessCollector(Collector):
    """All processes of jobs; those that hang, with what they wait for."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self.keeper = self._reader = context.processes

    def collect(self, now: float) -> ProcessSection:
        """Every process that is looked at in each tick, and how many are not."""
        reader = self._reader
        found = self.context.mounts.settled(reader.collect(now, self.deadline_s), now)
        return ProcessSection(processes=found, left_out=reader.left_out, unread=reader.unread)

    def problems(self, now: float) -> Iterator[Problem]:
        """What may not be seen. What is seen is right: no failure."""
        for problem in (self._reader.problem, self._reader.unseen, *self._reader.identities.problems()):
            if problem:
                yield Problem(problem, failed=False)


SPEC = CollectorSpec("process", ProcessSection, ProcessCollector)
