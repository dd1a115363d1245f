"""What jobs and nodes use of things that have a limit, and how long they waited for them."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct


class Resource(StrEnum):
    """What has a limit."""

    MEMORY = "memory"  # Bytes: of a job's or step's control group, else of the node.
    PIDS = "pids"  # Processes and threads, likewise.
    FILES = "files"  # Open files: of a process, else of the node.
    SHARED_MEMORY = "shared_memory"  # Bytes in /dev/shm.


class Usage(Struct):
    """How much of something is in use. Without `job_id`: of the whole node."""

    resource: Resource
    used: int
    limit: int | None = None  # None: there is none, or it is not known.
    peak: int | None = None
    refused: int | None = None
    """How often someone went without so far: of memory, processes that the kernel killed in the group; of pids,
    processes and threads that were refused."""
    by_limit: bool | None = None
    """Of memory: whether the limit of this group, or of one in it, ever left it with nothing. The kernel counts kills
    in a group also where its node, or a group above it, had none left. None: not known."""
    job_id: str | None = None
    step_id: str | None = None  # None: the job's own group.
    pid: int | None = None  # Of a process's own limit.
    rank: int | None = None

    @property
    def ratio(self) -> float:
        """Share of the limit that is in use; 0 where there is none."""
        return self.used / self.limit if self.limit else 0.0


class Pressure(Struct):
    """How much of the last minute was spent waiting (the kernel's pressure stall information, Linux 4.20), of a job
    or of the node. Without it, no row."""

    resource: str  # `cpu`, `memory` or `io`.
    some_ratio: float  # At least one waited.
    full_ratio: float  # All who had something to do waited.
    job_id: str | None = None
