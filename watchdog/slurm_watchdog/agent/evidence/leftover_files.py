"""Files that a job has left behind: which there are, for a child that is its owner."""

from __future__ import annotations

import os
from typing import Any

from slurm_watchdog.agent.evidence import cores
from slurm_watchdog.agent.evidence.flight_recorder import read_flight_recorders
from slurm_watchdog.agent.workers.request_types import FindFiles


def find_files(args: FindFiles, state: dict[str, Any]) -> dict[str, Any]:
    """In a child that is the job's owner: Flight Recorder dumps and core files; see those two modules for the
    arguments.

    `program` is that of the first of `pids` that lives: a core file of its neighbour is read with it.
    """
    program = None
    for pid in args.pids:
        try:
            program = os.readlink(f"/proc/{pid}/exe")
            break
        except OSError:
            continue
    return {
        "flight_recorder": read_flight_recorders(args, state),
        "core": cores.find_cores(args, state),
        "program": program,
    }
