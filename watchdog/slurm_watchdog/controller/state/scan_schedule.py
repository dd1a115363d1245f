"""Whose job it is: which jobs a tick looks at, where they are too many to look at all of them each second. Pure.

What a tick may cost is bounded by the number of processes it walks over, fewer on a slow core, so that reports are
taken while it judges. Below that number everything is looked at in every tick. Above it half of a tick is for jobs
about which there is news or trouble, and all that is left for those that were not looked at for longest: no one
waits long, however much trouble there is.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.base.structs import Struct

PROCESSES_A_TICK = 15_000
"""75 jobs of 200 ranks. Measured: a tick of 10,000 nodes takes 0.25 to 0.4 s of a core with them, and a job of 80,000
ranks 6 s."""
AT_LEAST = 4_000
TICK_CPU_S = 0.25  # Of a core, of each tick: the rest is for reports.


class ProcessBudget:
    """How many processes a tick walks over: as many as it can in TICK_CPU_S."""

    def __init__(self) -> None:
        self.most = PROCESSES_A_TICK
        self.walked = 0  # Over so many the last tick did.

    def note(self, cpu_s: float) -> None:
        """Takes what the last tick took of the processor."""
        if self.walked >= AT_LEAST and cpu_s > 0.0:
            fitting = min(PROCESSES_A_TICK, int(self.walked * TICK_CPU_S / cpu_s))
            self.most = max(AT_LEAST, (self.most + fitting) // 2)  # one tick more or less says little


class ScheduledJob(Struct):
    """One job that waits to be looked at."""

    job_id: str
    size: int  # Processes to walk over.
    restless: bool  # Something has happened, or is wrong, since the last look.
    looked_at: float  # -inf: never.


def choose(waiting: Iterable[ScheduledJob], most: int) -> frozenset[str]:
    """The jobs to look at now; at least one of each half, whatever its size."""
    jobs = sorted(waiting, key=lambda job: (job.looked_at, job.job_id))
    if sum(job.size for job in jobs) <= most:
        return frozenset(job.job_id for job in jobs)
    chosen: set[str] = set()
    left = _add_until((job for job in jobs if job.restless), most // 2, chosen)
    _add_until((job for job in jobs if job.job_id not in chosen), most - most // 2 + left, chosen)
    return frozenset(chosen)


def _add_until(jobs: Iterable[ScheduledJob], most: int, chosen: set[str]) -> int:
    """Adds to `chosen` until `most` processes are reached. Returns what is left of them."""
    for number, job in enumerate(jobs):
        if number and job.size > most:
            break
        chosen.add(job.job_id)
        most -= job.size
    return max(0, most)
