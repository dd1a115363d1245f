"""The supervisors of jobs, as the agents of their batch hosts read them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import FRESH_S, JobSupervisor, Sighting, SupervisorStatus


class Supervisors:
    """The newest word of each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Sighting]] = {}
        """SLURM_JOB_ID -> restarts of the run, and its supervisor; on the monotonic clock."""

    def apply(
        self, report: Report, made_at: float, job_of: Callable[[str], SlurmJob | None]
    ) -> Iterator[JobSupervisor]:
        """Takes over what a job's batch host says of it, and yields it; what other nodes say counts for nothing."""
        for each in report.supervisors:
            job = job_of(each.job_id)
            if job is not None and job.batch_host == report.node and job.restarts == each.restarts:
                seen = Sighting(status=each.status, written_at=made_at - each.age_s, read_at=made_at - each.read_age_s)
                self._known[each.job_id] = each.restarts, seen
                yield each

    def keep(self, job_ids: Container[str]) -> None:
        """Forgets all of other jobs."""
        self._known = {job_id: each for job_id, each in self._known.items() if job_id in job_ids}

    def of(self, job: SlurmJob, now: float) -> SupervisorStatus | None:
        """What the living supervisor of this run of the job says; None: it has none, or it does not live."""
        known = self.last_word(job)
        return None if known is None or now - known.written_at > FRESH_S else known.status

    def last_word(self, job: SlurmJob) -> Sighting | None:
        """What the supervisor of this run of the job said last, living or not; None: it has none."""
        restarts, known = self._known.get(job.process_id, (None, None))
        return known if restarts == job.restarts else None
