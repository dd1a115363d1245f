"""What the owner of a job directs, and its paths: kill switch, checkpoints, files that prove progress."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from slurm_watchdog.config.jobs import Jobs
from slurm_watchdog.controller.policy.owner_directives import OwnerDirectives, directives_of, fill
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.kill_switch import problem_of_path
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.slurm import SlurmJob


class OwnedPaths:
    """Paths of jobs, by the configuration and their owners' directives."""

    def __init__(self, jobs: Jobs, cluster: ClusterState):
        self._jobs, self._cluster = jobs, cluster

    def directives_of(self, job: SlurmJob) -> OwnerDirectives:
        """What the job's owner asks for, in its comment or its environment. A kill switch at a place where none
        may lie is a problem, so that the job is not acted on."""
        wish = directives_of(job.comment, self._cluster.variables_of(job))
        if wish.problem or not wish.kill_switch:
            return wish
        problem = problem_of_path(fill(wish.kill_switch, job), self._jobs.kill_switch_prefixes)
        return wish if problem is None else replace(wish, problem=f"kill_switch: {problem}")

    def patience_s(self, job: SlurmJob) -> float:
        """How long it has to make no step before it is said to stand, as its owner wants it; 0: nothing is said."""
        return self.directives_of(job).stall_after_s or 0.0

    def kill_switch(self, job: SlurmJob) -> str:
        """The kill switch of one run: where its owner wants it, else where the site has it."""
        wish = self.directives_of(job)
        return fill((not wish.problem and wish.kill_switch) or self._jobs.kill_switch, job)

    def watch(self, job: SlurmJob, log_starts: dict[str, int], node: str) -> JobWatch:
        """What the agent of `node` reads for a job. Files that all nodes share are read by the batch host alone."""
        jobs = self._jobs
        watch = JobWatch(
            job_id=job.process_id,
            restarts=job.restarts,
            uid=job.uid,
            log_offsets=tuple(log_starts.items()),
            progress_patterns=tuple(jobs.progress_patterns),
            kill_switch=self.kill_switch(job),
        )
        if node != job.batch_host:
            return watch
        logs = [path for path in (job.stdout, job.stderr) if path and path != "/dev/null"]
        own = self.directives_of(job).checkpoint_dir
        return replace(
            watch,
            log_paths=tuple(dict.fromkeys(logs)),
            checkpoint_trackers=_filled(jobs.checkpoint_trackers, job),
            checkpoint_directories=_filled([*([own] if own else []), *jobs.checkpoint_directories], job),
            progress_files=_filled(jobs.progress_files, job),
        )


def _filled(templates: Iterable[str], job: SlurmJob) -> tuple[str, ...]:
    return tuple(fill(template, job) for template in templates)
