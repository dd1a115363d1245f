"""The supervisors of jobs, as the agents of their batch hosts read them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import FRESH_S, JobSupervisor, SupervisorStatus


class Supervisors:
    """The newest word of each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[JobSupervisor, float]] = {}
        """SLURM_JOB_ID -> the supervisor, and when its status was written."""

    def apply(
        self, report: Report, made_at: float, job_of: Callable[[str], SlurmJob | None]
    ) -> Iterator[JobSupervisor]:
        """Takes over what a job's batch host says of it, and yields it; what other nodes say counts for nothing."""
        for each in report.supervisors:
            job = job_of(each.job_id)
            if job is not None and job.batch_host == report.node and job.restarts == each.restarts:
                self._known[each.job_id] = each, made_at - each.age_s
                yield each

    def keep(self, job_ids: Container[str]) -> None:
        """Forgets all of other jobs."""
        self._known = {job_id: each for job_id, each in self._known.items() if job_id in job_ids}

    def of(self, job: SlurmJob, now: float) -> SupervisorStatus | None:
        """What the living supervisor of this run of the job says; None: it has none, or it does not live."""
        known = self.written(job, now)
        return None if known is None else known[0]

    def written(self, job: SlurmJob, now: float) -> tuple[SupervisorStatus, float] | None:
        """The same, and when it was written."""
        each, written_at = self._known.get(job.process_id, (None, 0.0))
        if each is None or each.restarts != job.restarts or now - written_at > FRESH_S:
            return None
        return each.status, written_at
