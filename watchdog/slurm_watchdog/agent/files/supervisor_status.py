"""The status file of a supervisor, read as the owner of its job."""

from __future__ import annotations

import os

from slurm_watchdog.agent.files.safe_open import open_log
from slurm_watchdog.agent.workers.answer_types import SupervisorFile
from slurm_watchdog.agent.workers.request_types import ReadSupervisor
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing
from slurm_watchdog.model.supervisor import MAX_STATUS_BYTES, STATUS_FILE, parse_status


def read_supervisor(request: ReadSupervisor, worker: WorkerState) -> SupervisorFile | None:
    """The status in the directory of a run; None: there is none. Raises OSError, also for one that cannot be used."""
    try:
        fd = open_log(f"{request.base}/{request.name}/{STATUS_FILE}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    with closing(fd):
        data = os.read(fd, MAX_STATUS_BYTES + 1)
        age_s = max(0.0, clock.wall() - os.fstat(fd).st_mtime)
    try:
        return SupervisorFile(status=parse_status(data), age_s=age_s)
    except ValueError as problem:
        raise OSError(0, str(problem)) from None
