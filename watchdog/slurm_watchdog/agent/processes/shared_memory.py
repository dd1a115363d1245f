"""How full a /dev/shm is that processes have of their own: for a child.

Slurm's job_container/tmpfs and containers mount one for each job: that of the node shows nothing of it. Nothing is
opened for reading, no link is followed, and only a tmpfs is asked: nobody serves it who could fail to answer.
"""

from __future__ import annotations

import os
from typing import Final

from slurm_watchdog.agent.processes.owner import check_process
from slurm_watchdog.agent.workers.request_types import ReadSharedMemory
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.base.mounts import read_mounts

PLACE: Final = "/dev/shm"
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


def read_shared_memory(request: ReadSharedMemory, worker: WorkerState) -> list[tuple[int, int] | None]:
    """Of each process (bytes in use, size) of its /dev/shm; None where that is the node's, none, or not to be seen."""
    try:
        nodes = os.stat(PLACE).st_dev
    except OSError:  # the node has none
        nodes = None
    return [_of(pid, nodes, worker) for pid in request.pids]


def _of(pid: int, nodes: int | None, worker: WorkerState) -> tuple[int, int] | None:
    try:
        check_process(pid, worker)
        if [mount.fs_type for mount in read_mounts(pid) if mount.point == PLACE][-1:] != ["tmpfs"]:
            return None
        with (
            opened(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY) as root,
            opened("dev", _DIRECTORY, root) as dev,
            opened("shm", _DIRECTORY, dev) as place,
        ):
            if os.fstat(place).st_dev == nodes:
                return None
            found = os.fstatvfs(place)
    except (OSError, ValueError):  # it ended, or may not be looked into
        return None
    size = found.f_blocks * found.f_frsize
    return ((found.f_blocks - found.f_bfree) * found.f_frsize, size) if size > 0 else None
