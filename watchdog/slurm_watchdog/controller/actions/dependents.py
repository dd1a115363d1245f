"""Which jobs continue where one ends: the other elements of its array, and jobs that depend on it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import COMES, WAITING

_ANY_JOB = re.compile(r"\d+(?:_\d+|_\*)?")


def jobs_behind(job: SlurmJob, jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
    """Jobs of the same owner that wait for `job`: later elements of its array, and those whose --dependency
    names it (or `singleton` under the same name). Those that run already come first."""
    found = [
        other
        for other in jobs
        if other.uid == job.uid
        and other.job_id != job.job_id
        and other.state in COMES
        and ((job.array_job_id and job.array_job_id == other.array_job_id) or _depends(job, other))
    ]
    return tuple(sorted(found, key=lambda other: (other.state in WAITING, other.job_id)))


def freed_by(job: SlurmJob, jobs: Iterable[SlurmJob]) -> tuple[SlurmJob, ...]:
    """Jobs that wait for the end of `job`, and are not held: Slurm forgets their dependency when it ends, although it
    is requeued a moment later. One that waits for all elements of its array waits on while others are there."""
    behind = [other for other in jobs_behind(job, jobs) if other.state in WAITING and not other.held]
    others = any(each.array_job_id == job.array_job_id and each.job_id != job.job_id for each in behind)
    alone = job.array_job_id == "" or not others
    return tuple(each for each in behind if _depends(job, each, whole_array=alone))


def _depends(job: SlurmJob, other: SlurmJob, *, whole_array: bool = True) -> bool:
    if "singleton" in other.dependency and other.name == job.name:
        return True
    names = {job.job_id, f"{job.array_job_id}_*" if job.array_job_id and whole_array else job.job_id}
    return bool(names & set(_ANY_JOB.findall(other.dependency)))
