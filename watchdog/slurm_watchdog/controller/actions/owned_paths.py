"""What the owner of a job directs, and its paths: kill switch, checkpoints, files that prove progress."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile

from msgspec.structs import replace

from slurm_watchdog.config.controller import Jobs
from slurm_watchdog.controller.policy.owner_directives import OwnerDirectives, directives_of, fill
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.run import ids_on
from slurm_watchdog.knowledge.launchers import KILL_SWITCH_OPTION
from slurm_watchdog.model.kill_switch import problem_of_path
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.report import JobDirectives
from slurm_watchdog.model.slurm import SlurmJob, can_be_named
from slurm_watchdog.model.slurm_states import WAITING, may_hold_nodes

READ_WITHIN_S = 30.0
"""Ranks are told from other processes as soon as they are started and an agent has read them, which takes it two
intervals of its reports (3 s, up to 15 s on large sites). A job without ranks after this time will have none."""


class OwnedPaths:
    """Paths of jobs, by the configuration and their owners' directives."""

    def __init__(self, jobs: Jobs, cluster: ClusterState):
        self._jobs, self._cluster = jobs, cluster
        self._watches: dict[tuple[str, bool], tuple[SlurmJob, JobDirectives | None, JobWatch]] = {}
        """(job, whether on its batch host) -> what its agent reads, and of what that was made: thousands ask."""

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
        """The kill switch of one run: where its owner wants it, else where its command line has it if one may lie
        there, else where the site has it."""
        wish = self.directives_of(job)
        if not wish.problem and wish.kill_switch:
            return fill(wish.kill_switch, job)
        named = self._cluster.variables_of(job).get(KILL_SWITCH_OPTION, "")
        if named and problem_of_path(named, self._jobs.kill_switch_prefixes) is None:
            return named
        return fill(self._jobs.kill_switch, job)

    def why_switch_unknown(self, job: SlurmJob, now: float) -> str:
        """Why the place of the job's kill switch is not known yet, a sentence; empty: it is, or will not be known
        better. The environment and the command line of its ranks may name it, and agents read them some seconds after
        the ranks have started."""
        run = self._cluster.runs.get(job.job_id)
        if run is None or self.directives_of(job).kill_switch or now - run.began_at >= READ_WITHIN_S:
            return ""
        is_met = any(process.role is Role.RANK for process, _, _ in run.processes.values())
        if is_met and self._cluster.is_read(job):
            return ""
        return (
            f"no rank of the job has been read yet, whose command line may name its kill switch: retry in "
            f"{READ_WITHIN_S:.0f} s"
        )

    def switch_of_others(self, job: SlurmJob) -> tuple[str, tuple[str, ...]]:
        """Why the job's kill switch may end another job of its owner, a sentence, empty if it cannot; and the elements
        of its array that have to be held for that. A path without the job's number in it is seen by all that look
        there, and a job that waits may start before it is removed."""
        path, hold = self.kill_switch(job), list[str]()
        if is_named_after(path, job):
            return "", ()
        for other in self._cluster.jobs.values():
            if other.job_id == job.job_id or other.uid != job.uid:
                continue
            element = job.array_job_id and other.array_job_id == job.array_job_id
            kin = other.name == job.name or element
            if other.state in WAITING and element and (other.held or can_be_named(other.job_id)):
                hold += [] if other.held else [other.job_id]
            elif (other.state in WAITING and kin) or (may_hold_nodes(other.state) and self._may_see(other, path, kin)):
                return f"job {other.job_id} would see the kill switch {path} too: put {{job_id}} into its path", ()
        return "", tuple(hold)

    def _may_see(self, other: SlurmJob, path: str, kin: object) -> bool:
        """Of one whose processes have said nothing yet it is supposed where it is alike."""
        return self.kill_switch(other) == path or bool(kin and not self._cluster.variables_of(other))

    def watches(self, job: SlurmJob, log_starts: dict[str, int], node: str) -> Iterator[JobWatch]:
        """What the agent of `node` reads for a job; of a heterogeneous one it has to know, too, whose the components
        are that it knows processes of."""
        yield (watch := self.watch(job, log_starts, node))
        run = self._cluster.runs.get(job.job_id) if job.component_ids else None
        for process_job_id in () if run is None else ids_on(run, node):
            if process_job_id != watch.job_id:
                yield JobWatch(job_id=process_job_id, restarts=watch.restarts, uid=watch.uid)

    def watch(self, job: SlurmJob, log_starts: dict[str, int], node: str) -> JobWatch:
        """What the agent of `node` reads for a job. Files that all nodes share are read by the batch host alone."""
        key, wish = (job.job_id, node == job.batch_host), self._cluster.wish_of(job)
        known = self._watches.get(key)
        if known is not None and known[0] is job and known[1] is wish:
            return known[2]
        if len(self._watches) > 2 * len(self._cluster.jobs):
            self._watches.clear()
        watch = self._watch(job, log_starts, at_batch_host=key[1])
        self._watches[key] = job, wish, watch
        return watch

    def _watch(self, job: SlurmJob, log_starts: dict[str, int], *, at_batch_host: bool) -> JobWatch:
        jobs = self._jobs
        watch = JobWatch(
            job_id=job.process_id,
            restarts=job.restarts,
            uid=job.uid,
            log_offsets=tuple(log_starts.items()),
            progress_patterns=tuple(jobs.progress_patterns),
            kill_switch=self.kill_switch(job),
        )
        if not at_batch_host:
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


def is_named_after(path: str, job: SlurmJob) -> bool:
    """Whether the job's number is in the path. In the directories above it that also lead to the job's output the same
    number is a coincidence: Slurm makes none, so they were there before the job had a number."""
    parts, older = path.split("/"), os.path.dirname(job.stdout or "").split("/")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts, older, strict=False)))
    return job.process_id in re.findall("[0-9]+", "/".join(parts[shared:]))
