"""Files that a job has left behind: which there are, for a child that is its owner."""

from __future__ import annotations

import os

from slurm_watchdog.agent.evidence import cores
from slurm_watchdog.agent.evidence.error_files import read_error_files
from slurm_watchdog.agent.evidence.flight_recorder import read_flight_recorders
from slurm_watchdog.agent.files.job_root import roots_of
from slurm_watchdog.agent.workers.answer_types import LeftoverFiles
from slurm_watchdog.agent.workers.request_types import FindFiles
from slurm_watchdog.agent.workers.worker_state import WorkerState


def find_files(request: FindFiles, worker: WorkerState) -> LeftoverFiles:
    """Flight Recorder dumps, error files and core files, and the program of the first of `pids` that lives."""
    program = None
    for pid in request.pids:
        try:
            program = os.readlink(f"/proc/{pid}/exe")
            break
        except OSError:
            continue
    with roots_of(request.roots) as roots:
        return LeftoverFiles(
            flight_recorder=tuple(read_flight_recorders(request, roots)),
            own_words=tuple(read_error_files(request, roots)),
            core=tuple(cores.find_cores(request)),
            program=program,
        )
