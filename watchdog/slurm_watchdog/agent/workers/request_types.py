"""What workers can be asked: the type of each request, with its bounds. Pure.

Which function does it, as whom, and what else must hold is in slurm_watchdog.agent.helper.requests and
slurm_watchdog.agent.own_requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from slurm_watchdog.model.kill_switch import MAX_FIELD
from slurm_watchdog.model.observations import Process

MAX_PATH: Final = 4096  # linux/limits.h

Pid = Annotated[int, Meta(ge=1, le=2**22)]  # PID_MAX_LIMIT, linux/threads.h
Ticks = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=600.0)]
Word = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Path = Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]
Pattern = Annotated[str, Meta(max_length=2048)]
Field = Annotated[str, Meta(max_length=MAX_FIELD)]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker is asked. Converted from JSON, and thereby checked, before the function that does it sees it."""


class BlockedCall(Request, frozen=True):
    """One thread in a system call: which file is it about?"""

    pid: Pid
    thread: Pid
    syscall: Annotated[str, Meta(max_length=64)] | None
    args: Annotated[list[int], Meta(max_length=6)]


class LookAtProcesses(Request, frozen=True):
    """What processes do, as far as the kernel says without stopping them."""

    processes: Annotated[list[tuple[Pid, Ticks]], Meta(max_length=256)]
    silent_mounts: Annotated[list[Path], Meta(max_length=256)]


class DumpProcessStacks(Request, frozen=True):
    """Python stacks of processes, within `budget_s`."""

    node: Name
    budget_s: Seconds
    processes: Annotated[list[Process], Meta(max_length=64)]


class LastKernelLines(Request, frozen=True):
    """The end of the kernel's log."""

    path: Path


class PrepareDirectory(Request, frozen=True):
    """The directory of a kill switch, to be made for user `uid`."""

    base: Path
    name: Name
    uid: int = -1


class SwitchDirectory(Request, frozen=True):
    """The directory of a kill switch: `name` below `base`."""

    base: Path
    name: Name


class Follow(Request, frozen=True):
    """News of log files; `taken` is the token of the last answer that was used."""

    files: Annotated[list[tuple[Word, Path, int | None]], Meta(max_length=4096)]
    globs: Annotated[list[tuple[Word, Path]], Meta(max_length=4096)] = []
    own: Annotated[dict[Word, Annotated[list[Pattern], Meta(max_length=64)]], Meta(max_length=512)] = {}
    taken: Word | None = None


class LastLines(Request, frozen=True):
    """The last lines of logs."""

    files: Annotated[list[tuple[Word, Path]], Meta(max_length=64)]


class FindFiles(Request, frozen=True):
    """Core files and Flight Recorder dumps of a job."""

    files: Annotated[list[tuple[Path, int | None, float]], Meta(max_length=1024)]
    uid: int
    max_bytes: Annotated[int, Meta(ge=0, le=8 << 20)]
    places: Annotated[list[tuple[Path, Name]], Meta(max_length=256)]
    max_age_s: float
    pids: Annotated[list[Pid], Meta(max_length=256)]


class ReadCore(Request, frozen=True):
    """The frames of a core file."""

    path: Path
    program: Path | None


class LookAtCheckpoints(Request, frozen=True):
    """The newest checkpoint in each directory; (job, path) of trackers and of files that change with progress."""

    mount: Path
    others: Annotated[list[Path], Meta(max_length=4096)]
    budget_s: Seconds
    directories: Annotated[list[tuple[Word, Path, dict[str, Any] | None]], Meta(max_length=64)]
    trackers: Annotated[list[tuple[Word, Path]], Meta(max_length=64)]
    clocks: Annotated[list[tuple[Word, Path]], Meta(max_length=64)] = []


class ProbeDirectory(Request, frozen=True):
    """Whether a mount answers, by a look or a write in a directory on it."""

    directory: Path
    mount: Path
    write: bool
    node: Name


class SignalProcess(Request, frozen=True):
    """One process that outlived its job on a GPU: see slurm_watchdog.agent.processes.terminate, which
    believes none of it."""

    pid: Pid
    start_ticks: Ticks
    uid: int
    comm: Annotated[str, Meta(max_length=64)]
    boot_id: Annotated[str, Meta(max_length=64)]
    job_id: Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
    minors: Annotated[list[Annotated[int, Meta(ge=0, le=1023)]], Meta(min_length=1, max_length=1024)]
    how: Literal["look", "term", "kill"]


class KillSwitch(Request, frozen=True):
    """A kill switch: its line is composed of these values by the child, and never handed to it."""

    path: Path
    node: Name
    by: Field
    why: Field
    incident: Field
    decision: Field


# -- of the agent for itself ---------------------------------------------------------------------------------------


class ReadGpus(Request, frozen=True):
    """NVML's values of every GPU."""

    dear: Literal["all"] | list[tuple[int, str]]
    """What is read besides, as (index, PROCESSES or HEALTH), the most urgent first: the first of them, and
    more while `budget_s` of driver
    time lasts. `all`: the processes of every GPU, whatever it takes."""
    budget_s: Seconds


class CheckConfig(Request, frozen=True):
    """Whether the configuration in `file` can take the place of the `running` one, JSON of
    slurm_watchdog.config.agent_settings.Settings."""

    file: Path
    running: str
    deadline_s: Seconds
