"""What an incident is decided about: each of its jobs by itself, or each process that outlived its job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slurm_watchdog.controller.policy.orphan_process import is_same_process
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.model.actions import Decision
from slurm_watchdog.model.incidents import GpuProcess, Incident
from slurm_watchdog.model.slurm import SlurmJob

Matter = str | GpuProcess
"""The id of a job, or a process."""


def matters_of(
    incident: Incident,
    job_of: Callable[[str], SlurmJob | None],
    rule_of: Callable[[str, SlurmJob | None], Rule],
) -> tuple[Matter, ...]:
    """An incident of one filesystem may hold several jobs, one of leftovers many processes; these are decided
    about where a site has said that something is to be done. Where nothing is done about any job one decision
    says so for all."""
    if incident.processes:
        return incident.processes if rule_of(incident.kind, None).ladder else ()
    jobs = [job for job_id in incident.jobs_now if (job := job_of(job_id))]
    acts = any(rule_of(incident.kind, job).ladder for job in jobs)
    return incident.jobs_now if acts else incident.jobs_now[:1]


def decided_about(matter: Matter, decisions: Iterable[Decision]) -> list[Decision]:
    """Those of an incident's decisions that are about this job or process, in their order."""
    if isinstance(matter, GpuProcess):
        return [each for each in decisions if is_same_process(each.process, matter)]
    return [each for each in decisions if each.fence is None or each.fence.job_id == matter]


def job_in(matter: Matter, job_of: Callable[[str], SlurmJob | None]) -> SlurmJob | None:
    """The job that is decided about; None for a process, or if Slurm does not know the job."""
    return None if isinstance(matter, GpuProcess) else job_of(matter)
