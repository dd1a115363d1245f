"""Jobs that are over, for a while longer than Slurm lists them, and which of them were links of one chain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_watchdog.controller.state.run import Run, past_run
from slurm_watchdog.model.past_runs import PastRun
from slurm_watchdog.model.slurm import SlurmJob

KEPT_ENDED_S = 3600.0
"""Slurm forgets a job after some minutes (MinJobAge, 300 s by default): too soon for who looks at it in the morning."""
MAX_ENDED = 500
MAX_NAMES = 2000
MAX_LINKS = 20
"""Ended jobs that are remembered of one user and name."""
SLACK_S = 30.0
"""Slurm is asked every few seconds: a job may be seen to begin before the one before it is seen to end."""


@dataclass
class _Link:
    ended_at: float
    first_step: int | None
    successors: set[str] = field(default_factory=set)


@dataclass
class PastJobs:
    """One loop owns it."""

    _gone: OrderedDict[str, Run] = field(default_factory=OrderedDict)
    """Runs of jobs that Slurm lists no more."""
    _links: OrderedDict[tuple[str, str], OrderedDict[str, _Link]] = field(default_factory=OrderedDict)
    """(user, name) -> job -> how it ended."""
    _past: dict[str, tuple[tuple[int, int | None, str], PastRun]] = field(default_factory=dict)

    def add_gone(self, run: Run, now: float) -> None:
        """Slurm does not list this run's job any more."""
        if run.started and run.inactive_since is not None:
            self._gone[run.job.job_id] = run
        while self._gone:
            oldest = next(iter(self._gone.values()))
            if len(self._gone) <= MAX_ENDED and now - (oldest.inactive_since or now) < KEPT_ENDED_S:
                break
            del self._gone[oldest.job.job_id]
            self._past.pop(oldest.job.job_id, None)

    def gone(self, now: float) -> list[Run]:
        """The jobs that have left Slurm's list within the last hour."""
        return [run for run in self._gone.values() if now - (run.inactive_since or now) < KEPT_ENDED_S]

    def returned(self, job_id: str) -> None:
        """Slurm lists it again, so it is no past."""
        self._gone.pop(job_id, None)
        self._past.pop(job_id, None)

    def past(self, run: Run, now: float) -> PastRun:
        """The run as past; rebuilt only when something more is known of it."""
        key = (run.errors.noted, max((c.step for c in run.clocks.values()), default=None), run.job.state)
        known = self._past.get(run.job.job_id)
        if known is None or known[0] != key or known[1].restarts != run.job.restarts:
            known = self._past[run.job.job_id] = (key, past_run(run, now))
        return known[1]

    def add_link(self, job: SlurmJob, past: PastRun, successors: tuple[str, ...]) -> None:
        """This job is over, and these were there to come after it."""
        links = self._links.setdefault((job.user, job.name), OrderedDict())
        self._links.move_to_end((job.user, job.name))
        link = links.setdefault(job.job_id, _Link(past.ended_at, past.first_step))
        link.successors.update(successors[:MAX_LINKS])
        while len(links) > MAX_LINKS:
            links.popitem(last=False)
        while len(self._links) > MAX_NAMES:
            self._links.popitem(last=False)

    def preceded_by(self, job: SlurmJob, past: PastRun) -> tuple[str, ...]:
        """The jobs that this one followed on: it was there when they ended, ran after them, and its steps
        continued from theirs.

        A sweep, or somebody who tries again and again, begins at the first step each time and is no chain.
        """
        links: Mapping[str, _Link] = self._links.get((job.user, job.name), {})
        return tuple(
            job_id
            for job_id, link in links.items()
            if job_id != job.job_id
            and job.job_id in link.successors
            and link.ended_at <= past.began_at + SLACK_S
            and link.first_step is not None
            and past.first_step is not None
            and past.first_step > link.first_step
        )
