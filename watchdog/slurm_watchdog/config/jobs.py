"""The section `jobs` of the configuration: which jobs are watched, and where their files are."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.config.types import JobPath, Section, template_problems
from slurm_watchdog.model.kill_switch import problem_of_path, problem_of_prefix
from slurm_watchdog.parse.training_log.site_patterns import MAX_PATTERNS, problem_of


class Jobs(Section, frozen=True):
    """Which jobs are watched, and what is known about them."""

    partitions: tuple[str, ...] = ()
    """Watch jobs of these partitions only; empty = all."""
    kill_switch: str = "/run/slurm-watchdog/jobs/{job_id}.{restarts}/kill"
    """File that the trainer looks for at every step; it may have {job_id} {restarts} {user} {workdir}."""
    kill_switch_prefixes: tuple[str, ...] = ()
    """Directories on shared filesystems below which a kill switch may lie as well, such as [/scratch]."""
    checkpoint_trackers: tuple[JobPath, ...] = ()
    """Files with the step of the newest complete checkpoint, such as '{workdir}/checkpoints/latest'."""
    checkpoint_directories: tuple[JobPath, ...] = ()
    """Where jobs keep their checkpoints, such as '{workdir}/checkpoints'."""
    progress_patterns: tuple[str, ...] = ()
    """Regular expressions for log lines of your trainers, with groups step (or tokens), total, loss,
    step_seconds: 'it (?P<step>[0-9]+)'."""
    progress_files: tuple[JobPath, ...] = ()
    """Files that the training loop updates, for jobs that log no steps, such as '{workdir}/heartbeat'; never
    the log."""

    def problems(self) -> Iterator[str]:
        wrong = template_problems(self.kill_switch, "job_id", "user", "workdir", "restarts")
        of_switch = [f"kill_switch: {each}" for each in wrong]
        if "{job_id}" not in self.kill_switch:
            of_switch.append("kill_switch: must contain {job_id}, or one job's switch would end another job")
        for index, prefix in enumerate(self.kill_switch_prefixes):
            if (problem := problem_of_prefix(prefix, hidden=True)) is not None:
                of_switch.append(f"kill_switch_prefixes[{index}]: {problem}")
        if not of_switch and (problem := _misplaced(self.kill_switch, self.kill_switch_prefixes)):
            of_switch.append(f"kill_switch: {problem}")
        yield from of_switch
        if len(self.progress_patterns) > MAX_PATTERNS:
            yield f"progress_patterns: more than {MAX_PATTERNS} patterns"
        for index, pattern in enumerate(self.progress_patterns):
            problem = problem_of(pattern)
            if problem is not None:
                yield f"progress_patterns[{index}]: {pattern[:80]!r} {problem}"


def _misplaced(template: str, prefixes: tuple[str, ...]) -> str | None:
    """Why no run's switch could lie where the template says; where a job works is only known when it runs."""
    workdir = f"{prefixes[0].rstrip('/')}/x" if prefixes else "/home/ann"
    values = {"job_id": "1", "restarts": "0", "user": "ann", "workdir": workdir}
    return problem_of_path(template.format_map(values), prefixes)
