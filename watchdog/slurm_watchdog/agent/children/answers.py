"""Answers of children: a type for each, which the agent checks when it decodes one.

The requests are in slurm_watchdog.agent.children.requests, each with the type of its answer.
"""

from __future__ import annotations

import msgspec

from slurm_watchdog.agent.proc.system_call import SeenCall
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.observations import CallTarget, Checkpoint, Event, Gpu, Link, LogFile


class IdentifiedProcess(Struct):
    """One process: who it is, and what its environment and its command line say."""

    pid: int
    start_ticks: int | None = None
    uid: int | None = None  # Its real user.
    environ: dict[str, str] | None = None  # knowledge.launchers.ENVIRONMENT; None: ended, or not to be read.
    exe: str = ""
    title: str = ""  # Of a slurmstepd.
    cwd: str = ""  # This and the fields below: of what may hold a rank.
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    checkpoint_directories: tuple[str, ...] = ()
    collective_timeout: tuple[float, bool] | None = None  # Seconds, and whether they are only assumed.
    foreign: bool = False  # It is not one ordinary user's, so nothing was read of it (children.become_user).
    denied: bool = False  # The kernel refused a file of it; otherwise it has ended.
    error: str | None = None


class ResolvedCall(Struct):
    """The file that a blocked call is about."""

    target: CallTarget = CallTarget()
    error: str | None = None


class OpenFiles(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What processes of a job have open, or mapped: what looks like a log, and the mounts of all storage."""

    logs: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()


class ThreadFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Those of these that were asked for."""

    cpu_ticks: int | None = None  # Of all threads of the process.
    io_bytes: int | None = None  # Of the process, through system calls.
    call: SeenCall | None = None
    devices: tuple[str, ...] | None = None  # Names of its open files that are devices.


class SeenThreads(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the first `looked` of the requested looks have found, by their place in the request: nothing where the
    thread has ended, may not be looked at, or is in no call that matters."""

    looked: int
    found: list[tuple[int, ThreadFacts]]


class LinkCounters(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A link, and what it has counted so far. `at`: when, on the monotonic clock of the machine."""

    link: Link
    at: float
    counts: dict[str, int]  # Of what becomes a rate of the link: `sent_bytes` of `sent_bytes_s`.


class FollowedFile(LogFile):
    """One log file: what is new in it, and how far it was read."""

    events: tuple[Event, ...] = ()  # Without job and source.
    dropped: int = 0
    seats: tuple[tuple[int, int, int, int], ...] = ()  # (pid, rank, local rank, world size), where Ray says it.


class FollowedLogs(Struct):
    """What is new in the logs of one child."""

    files: tuple[FollowedFile, ...]
    token: str  # Goes back with the next request: what was in an answer whose token does not is reported again.
    globs: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """(job, pattern, paths) of the patterns that were looked up in this request."""


class LogEnd(Struct):
    """The last lines of one log, or why they could not be read."""

    path: str
    lines: tuple[str, ...] = ()
    error: str | None = None


class Listeners(Struct):
    """Who listens on one TCP port."""

    addresses: tuple[str, ...] = ()  # `127.0.0.1:28028`, of processes of the job.
    shared: bool = False  # Other processes listen there, too.
    namespace: str = ""  # The network of these processes, as the kernel names it.


class Footprint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What shows that a candidate was written to: how many files, their bytes, and when the newest was changed."""

    files: int  # files.WAS_COMPLETE: it was complete, so no one counted.
    size_bytes: int  # Of one that was complete: of all its files, 0 if they are too many, files.UNMEASURED.
    newest_ns: int
    since: float = 0.0  # Monotonic clock: since when it has been like that, as far as scans have shown.
    whole: bool = True  # False: there were more files than were counted.

    def equals(self, other: Footprint) -> bool:
        """Whether nothing has changed between the two."""
        return (self.files, self.size_bytes, self.newest_ns) == (other.files, other.size_bytes, other.newest_ns)


Footprints = dict[str, Footprint]
"""What a scan of a directory is compared with, by path: the child keeps nothing, so it travels to and fro."""


class ScannedPlace(Checkpoint):
    """A directory of checkpoints with its newest complete one and the one that is being written; a tracker with its
    step; or a file whose changes are progress."""

    memory: Footprints | None = None
    moved: str | None = None  # Where the place lies, if that is another mount: then nothing was read.
    was_read: bool = False
    at_ns: int = 0  # When `path` was complete, or the file was changed, by the filesystem's clock; 0: not known.


class GpuReading(Struct):
    """All GPUs of a node, or why there is nothing to read."""

    missing: str = ""  # This node has no driver.
    error: str = ""  # NVML as a whole refuses.
    gpus: tuple[Gpu, ...] | None = None
    events: tuple[tuple[int, int, str | None], ...] = ()  # (type, data, UUID).
    driver_s: float = 0.0  # Spent inside NVML.
