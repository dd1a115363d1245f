"""The sections `controller`, `slurm` and `jobs` of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from slurm_watchdog.config.types import (
    Address,
    AddressOrNone,
    Bytes,
    JobPath,
    Seconds,
    Section,
    Span,
    template_problems,
)
from slurm_watchdog.model.kill_switch import problem_of_path, problem_of_prefix
from slurm_watchdog.parse.training_log.site_patterns import MAX_PATTERNS, problem_of


class Controller(Section, frozen=True):
    """The daemon on the management node."""

    listen: Address = "127.0.0.1:9765"
    """Address for agents, /metrics and /healthz."""
    page_listen: AddressOrNone = "127.0.0.1:9767"
    """Address of the page for browsers; empty = none."""
    user_listen: AddressOrNone = ""
    """Address at which users on other machines ask about their jobs, with MUNGE, such as 10.0.0.1:9768; empty =
    none."""
    socket: str = "/run/slurm-watchdog/controller.sock"
    """Local socket of the commands."""
    socket_group: str = "slurm-watchdog-users"
    """The group whose members may use the commands; empty = the controller's own."""
    state_directory: str = "/var/lib/slurm-watchdog"
    """Directory of the journal: on a local disk."""
    journal_url: str = ""
    """SQLAlchemy address of the journal; empty = SQLite in `state_directory`."""
    tick: Span = 1.0
    """Time between two judgements."""
    agent_silent_after: Span = 40.0
    """After this time without a report, what a node's processes do counts as unknown."""
    warm_up: Seconds = 60.0
    """For this time after a start or a stall the controller only observes."""
    evidence_keep: Span = 2592000.0
    """Stacks, sockets and last lines are kept this long; incidents and decisions stay."""
    evidence_per_day: Bytes = 2 * 1024**3
    """So much evidence is kept of a day on average, at most twice of one; what is more is judged and not kept."""

    def problems(self) -> Iterator[str]:
        if self.journal_url and "://" not in self.journal_url:
            wanted = "must be an SQLAlchemy URL, such as postgresql+psycopg://watchdog@db1/watchdog, or empty"
            yield f"journal_url: {wanted}"  # not what it is: a password may be in it


class Slurm(Section, frozen=True):
    """How the controller talks to Slurm."""

    client: Literal["auto", "pyslurm", "command_line"] = "auto"
    """Who lists jobs and nodes: pyslurm, or squeue and sinfo; auto = pyslurm where it is installed and starts."""
    pyslurm_python: str = ""
    """The interpreter that has pyslurm, such as /usr/bin/python3; empty = the watchdog's own."""
    bin_directory: str = ""
    """Where squeue and scontrol are; empty = PATH."""
    token_file: str = ""
    """File with the token SLURM_JWT, read for each command; empty = the environment's."""
    slurmd_port: Annotated[int, Meta(ge=1, le=65535)] = 6818
    """SlurmdPort of slurm.conf: where a node is asked whether its machine is still there."""
    poll_interval: Span = 10.0
    """Time between two listings of jobs and nodes."""
    deadline: Span = 20.0
    """An answer that takes longer counts as unknown, never as empty."""


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
