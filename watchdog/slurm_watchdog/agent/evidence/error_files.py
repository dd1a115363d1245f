"""What ranks said of their own end, in the files that torchelastic names to each: an exception in `error.json`, and
faulthandler's words in `stderr.log` beside it, where a launcher redirects standard error. Read as the job's owner.
"""

from __future__ import annotations

import os
import stat

from msgspec.structs import replace

from slurm_watchdog.agent.evidence import cores
from slurm_watchdog.agent.evidence.flight_recorder import read_flight_recorders
from slurm_watchdog.agent.files.job_root import OWN, Roots, open_in, roots_of
from slurm_watchdog.agent.workers.request_types import FindFiles
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing
from slurm_watchdog.model.evidence import FoundFile
from slurm_watchdog.parse.error_file import MAX_BYTES, parse_error_file, parse_fatal_error

STDERR = "stderr.log"
END_BYTES = 64 * 1024  # Of standard error.
KIND = "own_words"


def read_error_files(request: FindFiles, roots: Roots = OWN) -> list[FoundFile]:
    """Those that are there, belong to the owner and say why a rank ended."""
    found = []
    for path, rank in request.error_files:
        root, beside = roots.of(rank), os.path.join(os.path.dirname(path), STDERR)
        each = _read(root, path, request.uid) or _read(root, beside, request.uid)
        if each is not None:
            found.append(replace(each, rank=rank))
    return found


def _read(root: int | None, path: str, uid: int) -> FoundFile | None:
    try:
        fd = open_in(root, path, os.O_RDONLY)
    except OSError:
        return None
    with closing(fd):
        about = os.fstat(fd)
        age_s = clock.wall() - about.st_mtime
        if not stat.S_ISREG(about.st_mode) or about.st_uid != uid or age_s < 0:
            return None  # a time in the future is an age that is not known
        each = FoundFile(kind=KIND, path=path, size_bytes=about.st_size, age_s=age_s)
        try:
            if path.endswith(STDERR):
                said = parse_fatal_error(os.pread(fd, END_BYTES, max(0, about.st_size - END_BYTES)))
            else:
                said = parse_error_file(os.pread(fd, MAX_BYTES + 1, 0)) if about.st_size else None
        except (OSError, ValueError):
            return None
    return None if said is None else replace(each, said=said)


def find_files(request: FindFiles, worker: WorkerState) -> list[FoundFile]:
    """Flight Recorder dumps, error files and core files."""
    with roots_of(request.roots) as roots:
        return [*read_flight_recorders(request, roots), *read_error_files(request, roots), *cores.find_cores(request)]
