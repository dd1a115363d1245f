"""Dumps of PyTorch's Flight Recorder: where each rank writes its own, asked for where there is a pipe for it, read as
the job's owner.

A job that has set up the pipe for it is asked for a fresh dump: PyTorch's monitor thread writes it, whatever the other
threads do. Nothing else of a job is touched.
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
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.model.evidence import FoundFile
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder

PREFIX_VARIABLES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Prefix of the file, to which the rank is appended; the newer name first. Both are still read
(torch/csrc/distributed/c10d/FlightRecorder)."""
PIPE_VARIABLE: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Prefix of the pipe, to which the rank and `.pipe` are appended (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp,
DumpPipe); there is none unless the recorder has a buffer."""
FRESH_S, LOOK_EVERY_S = 6.0, 0.25
"""So long a dump that was asked for is waited for: the monitor looks into its pipe every second
(TORCH_NCCL_COORD_CHECK_MILSEC), and writes for less than one."""
OLD_PREFIX: Final = "/tmp/nccl_trace_rank_"
"""The default of older releases."""
NEW_NAME: Final = "torch/comm_lib_trace_rank_"
"""Below $XDG_CACHE_HOME, otherwise below ~/.cache: the default of newer releases."""
CLOCK_SLACK_S: Final = 1.0
"""A file server's clock may be ahead by so much without being wrong: then the dump is new."""
AHEAD: Final = "the clock that dated it is ahead by {:.0f} s: whether it is of this hang is not known"
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


def pipe_of(environ: Mapping[str, str], rank: int | None) -> str | None:
    """The pipe by which a rank with this environment can be asked for a dump; None: it has set up none."""
    prefix = environ.get(PIPE_VARIABLE, "")
    return f"{prefix}{rank}.pipe" if prefix.startswith("/") and rank is not None else None


def read_flight_recorders(request: FindFiles) -> list[FoundFile]:
    """The dumps that are there, belong to the owner and are not older than the job; of ranks with a pipe, new ones."""
    asked_at = clock.wall()
    asked = sum(_ask(path, request.uid) for path in request.pipes)
    until = clock.monotonic() + FRESH_S
    while asked and clock.monotonic() < until and _fresh(request, asked_at) < asked:
        wait_readable((), LOOK_EVERY_S)
    left, wall = request.max_bytes, clock.wall()
    found = []
    for path, rank, max_age_s in request.files:
        room = min(left, MAX_KEPT_BYTES)
        each = _read(_at_home(path, request.uid), request.uid, rank or 0, max_age_s, room, wall)
        if each is not None:
            left -= len(each.content or b"")
            found.append(replace(each, rank=rank))
    return found


def _ask(path: str, uid: int) -> bool:
    """Whether somebody reads from this pipe of the owner's, and was asked."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # among others: nobody reads from it
        return False
    with closing(fd):
        about = os.fstat(fd)
        if not stat.S_ISFIFO(about.st_mode) or about.st_uid != uid:
            return False
        try:
            return os.write(fd, b"1") == 1
        except OSError:
            return False


def _fresh(request: FindFiles, since: float) -> int:
    """How many of the dumps were written since then, and are no longer written to."""
    found = 0
    for path, _, _ in request.files:
        try:
            at = os.lstat(_at_home(path, request.uid)).st_mtime
        except OSError:
            continue
        found += since - LOOK_EVERY_S <= at <= clock.wall() - LOOK_EVERY_S
    return found


def _at_home(path: str, uid: int) -> str:
    if not path.startswith("~/"):
        return path
    try:
        return pwd.getpwuid(uid).pw_dir + path[1:]
    except KeyError:
        return path


def _read(path: str, uid: int, rank: int, max_age_s: float, max_bytes: int, wall: float) -> FoundFile | None:
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
        body = _whole(fd)
        try:
            record = parse_flight_recorder(body, rank, about.st_mtime)
            known = age_s >= -CLOCK_SLACK_S
            each = replace(each, record=record) if known else replace(each, error=AHEAD.format(-age_s))
        except ValueError as refused:
            each = replace(each, error=str(refused))
        packed = zlib.compress(body, 6)
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
