"""What is known of one process, and where it belongs: values, and what control groups and slurmstepd say. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_watchdog.knowledge.slurm_groups import step_of_group
from slurm_watchdog.model.observations import Role

_STEPD = re.compile(r"slurmstepd: \[(\d+)(?:\+\d+)?(?:\.([0-9a-z]+))?")


@dataclass(frozen=True)
class JobStep:
    """Job and step ("0", "batch", …), as a control group or slurmstepd names them."""

    job_id: str
    step_id: str | None = None


@dataclass(frozen=True)
class ProcessFacts:
    """What is known of one process for telling where it belongs. `environ` None: not read yet, or not readable."""

    pid: int
    start_ticks: int
    ppid: int
    comm: str
    uid: int  # Its real user.
    cgroup: JobStep | None = None
    environ: Mapping[str, str] | None = None
    exe: str = ""  # File name of its program: `bash` for a script that the kernel lists under the script's own name.
    stepd: JobStep | None = None  # Of a slurmstepd only: the step it looks after.
    denied: bool = False
    """Its environment may not be read (another user's namespace): it counts as having its parent's."""
    own_pid: int | None = None  # Its number in its own PID namespace, where that is another one than the agent's.
    cwd: str = ""  # Working directory of what may hold a rank, when it was identified.
    checkpoint_directories: tuple[str, ...] = ()  # Those that its command line names.
    settings: tuple[tuple[str, str], ...] = ()
    """Of what may hold a rank: the variables that decide how it computes and communicates, for evidence
    alone, secrets masked."""
    foreign: bool = False
    """Not an ordinary user's through and through (a set-user-id program, root's): nothing of it is read, and
    it is no rank."""
    collective_timeout: tuple[float, bool] | None = None
    """Seconds after which its collectives are given up, and whether that is only assumed; see
    knowledge.collective_timeouts."""


@dataclass(frozen=True)
class JobMember:
    """Where a process belongs."""

    job_id: str
    step_id: str | None
    role: Role
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    left_over: bool = False  # It belongs to an earlier run of the job, which was requeued to this node meanwhile.
    by: str = ""  # How that is known: BY_SLURM, or BY_CLAIM.
    launcher: bool = False
    """It has started ranks: it never is one, also when they are gone and only its own variables are left."""


Key = tuple[int, int]  # (pid, start ticks): unique until a reboot.


def parse_cgroup(text: str) -> JobStep | None:
    """Job and step in the text of /proc/PID/cgroup, version 1 or 2; None outside of jobs."""
    if "/job_" not in text:
        return None
    places = [place for line in text.splitlines() if "/job_" in line and (place := place_of(line.split(":", 2)[-1]))]
    return next((place for place in places if place.step_id), places[0] if places else None)


def place_of(path: str) -> JobStep | None:
    """The same of a group's path."""
    found = step_of_group(path)
    return None if found is None else JobStep(*found)


def parse_stepd(cmdline: str) -> JobStep | None:
    """The step that a slurmstepd names in its title: `slurmstepd: [4.0]`, `slurmstepd: [4.batch]`."""
    match = _STEPD.match(cmdline)
    return JobStep(match[1], match[2]) if match else None


def as_slurm_job(environ: dict[str, str]) -> dict[str, str]:
    """What `slurm-watchdog run` has started outside of Slurm is its job, said in Slurm's words. Inside of a
    Slurm job that one counts."""
    own = environ.get("SLURM_WATCHDOG_JOB_ID", "")
    if own and environ.get("SLURM_JOB_ID", own) == own:
        environ |= {"SLURM_JOB_ID": own, "SLURM_RESTART_COUNT": environ.get("SLURM_WATCHDOG_RESTARTS", "0")}
    return environ


def number_of(environ: Mapping[str, str] | None, name: str) -> int | None:
    text = (environ or {}).get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def restarts_of(process: ProcessFacts) -> int | None:
    """The run that its environment was made for; None where there is none."""
    environ = process.environ or {}
    return (number_of(environ, "SLURM_RESTART_COUNT") or 0) if "SLURM_JOB_ID" in environ else None
