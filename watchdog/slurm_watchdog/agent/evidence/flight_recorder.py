"""Dumps of PyTorch's Flight Recorder: where each rank writes its own, read as the job's owner and never unpacked here.

They are pickles, which can run code when they are opened: whoever wants to look into one does so with
PyTorch's own tool.
"""

from __future__ import annotations

import os
import pwd
import stat
import zlib
from collections.abc import Mapping
from typing import Any, Final

from slurm_watchdog.agent.workers.request_types import FindFiles
from slurm_watchdog.base import clock

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
    """Where a rank with this environment would write: what it is told, else all that PyTorch has ever chosen by itself.

    `~` stands for the owner's home, which only the child knows.
    """
    told = [environ[name] for name in PREFIX_VARIABLES if environ.get(name, "").startswith("/")]
    if told:
        return told[:1]
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [OLD_PREFIX, *([f"{cache}/{NEW_NAME}"] if cache.startswith(("/", "~/")) else [])]


def read_flight_recorders(args: FindFiles, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Given {"files": [[path, rank, max_age_s]…], "uid": owner, "max_bytes": all together, compressed}: for
    each that is there,
    belongs to that owner and is not older than the job {path, rank, size_bytes, age_s, content (hex of zlib)
    or None, error}."""
    left, wall = args.max_bytes, clock.wall()
    found = []
    for path, rank, max_age_s in args.files:
        each = _read(_at_home(path, args.uid), args.uid, max_age_s, min(left, MAX_KEPT_BYTES), wall)
        if each is not None:
            left -= len(each["content"] or "") // 2
            found.append(each | {"rank": rank})
    return found


def _at_home(path: str, uid: int) -> str:
    if not path.startswith("~/"):
        return path
    try:
        return pwd.getpwuid(uid).pw_dir + path[1:]
    except KeyError:
        return path


def _read(path: str, uid: int, max_age_s: float, max_bytes: int, wall: float) -> dict[str, Any] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(fd)
        age_s = wall - about.st_mtime
        if not stat.S_ISREG(about.st_mode) or about.st_uid != uid or age_s > max_age_s:
            return None
        each = {
            "path": path,
            "size_bytes": about.st_size,
            "age_s": max(0.0, age_s),
            "content": None,
            "error": None,
        }
        if about.st_size > MAX_FILE_BYTES:
            return each | {"error": f"larger than {MAX_FILE_BYTES >> 20} MiB: it stays where it is"}
        packed = zlib.compress(_whole(fd), 6)
        if len(packed) > max_bytes:
            return each | {
                "error": f"{len(packed)} bytes compressed are too many to be sent: it stays where it is"
            }
        return each | {"content": packed.hex()}
    finally:
        os.close(fd)


def _whole(fd: int) -> bytes:
    parts, size = [], 0
    while size < MAX_FILE_BYTES and (part := os.read(fd, 1 << 20)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
