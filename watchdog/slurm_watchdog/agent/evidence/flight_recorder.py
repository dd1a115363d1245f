"""Dumps of PyTorch's Flight Recorder: where each rank writes its own, read as the job's owner and never unpacked here.

They are pickles, which can run code when they are opened: PyTorch's own tool reads them.
"""

from __future__ import annotations

import os
import pwd
import stat
import zlib
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.agent.workers.request_types import FindFiles
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing
from slurm_watchdog.model.evidence import FoundFile

PREFIX_VARIABLES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Prefix of the file, to which the rank is appended; the newer name first. Both are still read
(torch/csrc/distributed/c10d/FlightRecorder)."""
OLD_PREFIX: Final = "/tmp/nccl_trace_rank_"
"""The default of older releases."""
NEW_NAME: Final = "torch/comm_lib_trace_rank_"
"""Below $XDG_CACHE_HOME, otherwise below ~/.cache: the default of newer releases."""
MAX_FILE_BYTES: Final = 8 << 20
MAX_KEPT_BYTES: Final = 256 * 1024
"""Of one rank, compressed."""


def prefixes(environ: Mapping[str, str]) -> list[str]:
    """Where a rank with this environment would write: what it names, else all that PyTorch has ever chosen by itself.

    `~` stands for the owner's home, which only the child knows.
    """
    told = [environ[name] for name in PREFIX_VARIABLES if environ.get(name, "").startswith("/")]
    if told:
        return told[:1]
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [OLD_PREFIX, *([f"{cache}/{NEW_NAME}"] if cache.startswith(("/", "~/")) else [])]


def read_flight_recorders(request: FindFiles) -> list[FoundFile]:
    """The dumps that are there, belong to the owner and are not older than the job."""
    left, wall = request.max_bytes, clock.wall()
    found = []
    for path, rank, max_age_s in request.files:
        each = _read(_at_home(path, request.uid), request.uid, max_age_s, min(left, MAX_KEPT_BYTES), wall)
        if each is not None:
            left -= len(each.content or b"")
            found.append(replace(each, rank=rank))
    return found


def _at_home(path: str, uid: int) -> str:
    if not path.startswith("~/"):
        return path
    try:
        return pwd.getpwuid(uid).pw_dir + path[1:]
    except KeyError:
        return path


def _read(path: str, uid: int, max_age_s: float, max_bytes: int, wall: float) -> FoundFile | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with closing(fd):
        about = os.fstat(fd)
        age_s = wall - about.st_mtime
        if not stat.S_ISREG(about.st_mode) or about.st_uid != uid or age_s > max_age_s:
            return None
        each = FoundFile(kind="flight_recorder", path=path, size_bytes=about.st_size, age_s=max(0.0, age_s))
        if about.st_size > MAX_FILE_BYTES:
            return replace(each, error=f"larger than {MAX_FILE_BYTES >> 20} MiB: it stays where it is")
        packed = zlib.compress(_whole(fd), 6)
        if len(packed) > max_bytes:
            error = f"{len(packed)} bytes compressed are too many to be sent: it stays where it is"
            return replace(each, error=error)
        return replace(each, content=packed)


def _whole(fd: int) -> bytes:
    parts, size = [], 0
    while size < MAX_FILE_BYTES and (part := os.read(fd, 1 << 20)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
