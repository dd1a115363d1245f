"""Files that ranks leave behind, read as the job's owner: Flight Recorder dumps, error files, core files.

A job that has set up the pipe for it is asked for a fresh dump: PyTorch's monitor thread writes it, whatever the other
threads do. Nothing else of a job is touched. What ranks said of their own end is in the files that torchelastic names
to each: an exception in `error.json`, and faulthandler's words in `stderr.log` beside it, where a launcher redirects
standard error.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import pwd
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from slurm_watchdog.agent.children.requests import FindFiles, WorkerState
from slurm_watchdog.agent.files.safe_open import Roots, open_in, roots_of
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing, opened
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.model.evidence import FoundFile
from slurm_watchdog.parse.error_file import MAX_BYTES, parse_error_file, parse_fatal_error
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder

PREFIX_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Prefix of the file, to which the rank is appended; the newer name first. Both are still read
(torch/csrc/distributed/c10d/FlightRecorder)."""
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Prefix of the pipe, to which the rank and `.pipe` are appended (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp,
DumpPipe); there is none unless the recorder has a buffer."""
FRESH_S, LOOK_EVERY_S = 6.0, 0.25
"""So long a dump that was asked for is waited for: the monitor looks into its pipe every second
(TORCH_NCCL_COORD_CHECK_MILSEC), and writes for less than one."""
TOGETHER_S = 10.0  # Two files of a rank that were written within so long are of one dump.
OLD_PREFIX = "/tmp/nccl_trace_rank_"  # The default of older releases.
NEW_NAME = "torch/comm_lib_trace_rank_"  # Below $XDG_CACHE_HOME, else below ~/.cache: newer releases.
CLOCK_SLACK_S = 1.0  # A file server's clock may be ahead by so much without being wrong: then the dump is new.
AHEAD = "the clock that dated it is ahead by {:.0f} s: whether it is of this hang is not known"
MAX_FILE_BYTES = 8 << 20
MAX_KEPT_BYTES = 256 * 1024  # Of one rank, compressed.


def prefixes(environ: Mapping[str, str]) -> list[str]:
    """Where a rank with this environment would write: what it names, else all that PyTorch has ever chosen by itself.
    `~` stands for the owner's home, which only the child knows."""
    told = [environ[name] for name in PREFIX_VARIABLES if environ.get(name, "").startswith("/")]
    if told:
        return told[:1]
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [OLD_PREFIX, *([f"{cache}/{NEW_NAME}"] if cache.startswith(("/", "~/")) else [])]


def pipe_of(environ: Mapping[str, str], rank: int | None) -> str | None:
    """The pipe by which a rank with this environment can be asked for a dump; None: it has set up none."""
    prefix = environ.get(PIPE_VARIABLE, "")
    return f"{prefix}{rank}.pipe" if prefix.startswith("/") and rank is not None else None


def names_of(prefix: str, rank: int | None) -> list[str]:
    """The files that may hold the dump of this rank: PyTorch writes a pickle without an ending, and where a training
    writes one by itself (`torch._C._distributed_c10d._dump_nccl_trace_json`), it is JSON."""
    return [f"{prefix}{rank}", f"{prefix}{rank}.json"]


@contextmanager
def _opened(
    request: FindFiles, roots: Roots, path: str, rank: int | None, flags: int = os.O_RDONLY,
    is_kind: Callable[[int], bool] = stat.S_ISREG,
) -> Iterator[tuple[int, os.stat_result]]:  # fmt: skip
    """A file of the owner's, for the block, as this rank names it, and what is known of it. Raises OSError, also for
    what is another user's, or no such thing."""
    if path.startswith("~/"):
        with suppress(KeyError):
            path = pwd.getpwuid(request.uid).pw_dir + path[1:]
    with closing(open_in(roots.get(rank, roots.get(None)), path, flags)) as fd:
        about = os.fstat(fd)
        if about.st_uid != request.uid or not is_kind(about.st_mode):
            raise PermissionError(errno.EACCES, "it is not a file of the job's owner", path)
        yield fd, about


def read_flight_recorders(request: FindFiles, roots: Roots = MappingProxyType({})) -> list[FoundFile]:
    """The dump of each rank that is there, belongs to the owner and is not older than the job; of ranks with a pipe,
    new ones. Of several of one rank the newest, of two that were written together the JSON."""
    asked_at, asked = clock.wall(), set[int | None]()
    for pipe, rank in request.pipes:
        with suppress(OSError), _opened(request, roots, pipe, rank, os.O_WRONLY, stat.S_ISFIFO) as (fd, _):
            os.write(fd, b"1")  # someone reads from it, else it could not be opened
            asked.add(rank)
    until = clock.monotonic() + FRESH_S
    while asked and clock.monotonic() < until:
        asked -= {
            rank
            for path, rank, _ in request.files
            # … and is no longer written to.
            if asked_at - LOOK_EVERY_S <= _written_at(request, roots, path, rank) <= clock.wall() - LOOK_EVERY_S
        }
        wait_readable((), LOOK_EVERY_S if asked else 0.0)
    left, found = request.max_bytes, []
    for rank in dict.fromkeys(rank for _, rank, _ in request.files):
        mine = {path: max_age_s for path, of, max_age_s in request.files if of == rank}
        dated = {path: _written_at(request, roots, path, rank) + TOGETHER_S * path.endswith(".json") for path in mine}
        path = max(mine, key=lambda each: dated[each])
        with suppress(OSError), _opened(request, roots, path, rank) as (fd, about):
            if (each := _read(fd, about, path, rank, mine[path], min(left, MAX_KEPT_BYTES))) is not None:
                left -= len(each.content or b"")
                found.append(each)
    return found


def _written_at(request: FindFiles, roots: Roots, path: str, rank: int | None) -> float:
    """When this file of the owner's was written (date); nothing else was ever written."""
    try:
        with _opened(request, roots, path, rank, os.O_PATH) as (_, about):
            return about.st_mtime
    except OSError:
        return float("-inf")


def _read(
    fd: int, about: os.stat_result, path: str, rank: int | None, max_age_s: float, max_bytes: int
) -> FoundFile | None:
    """The dump in a file; None if it is older than the rank."""
    age_s = clock.wall() - about.st_mtime
    if age_s > max_age_s:
        return None
    each = FoundFile(kind="flight_recorder", path=path, rank=rank, size_bytes=about.st_size, age_s=max(0.0, age_s))
    if about.st_size > MAX_FILE_BYTES:
        return replace(each, error=f"larger than {MAX_FILE_BYTES >> 20} MiB: it stays where it is")
    with open(fd, "rb", closefd=False) as file:
        body = file.read(MAX_FILE_BYTES)
    try:
        record = parse_flight_recorder(body, rank or 0, about.st_mtime)
        known = age_s >= -CLOCK_SLACK_S
        each = replace(each, record=record) if known else replace(each, error=AHEAD.format(-age_s))
    except ValueError as refused:
        each = replace(each, error=str(refused))
    packed = zlib.compress(body, 6)
    if len(packed) > max_bytes:
        return replace(each, error=f"{len(packed)} bytes compressed are too many to be sent: it stays where it is")
    return replace(each, content=packed)


MAX_ENTRIES = 8192  # Names that are looked at in one directory.
MAX_FOUND = 16
SYSTEMD_PLACE = "/var/lib/systemd/coredump"  # systemd-coredump(8): core.NAME.UID.BOOT.PID.TIME, compressed.
_SPECIFIER = re.compile(r"%.")


def places(core_pattern: str, directories: list[str], uses_pid: bool = True) -> list[tuple[str, str]]:
    """(directory, pattern of names) where core files of a process may lie, for the text of
    /proc/sys/kernel/core_pattern and the working directories of the job. Empty where a program takes them
    that we do not know (see core(5))."""
    pattern = core_pattern.strip()
    if pattern.startswith("|"):
        return [(SYSTEMD_PLACE, "core.*")] if "systemd-coredump" in pattern else []
    if not pattern:
        return []
    name = _SPECIFIER.sub(lambda found: "%" if found[0] == "%%" else "*", pattern)
    directory, _, base = name.rpartition("/")
    patterns = [base, f"{base}.*"] if uses_pid and "*" not in base else [base]
    if directory.startswith("/") and "*" not in directory:
        return [(directory, each) for each in patterns]
    return [(where, each) for where in directories for each in patterns] if not directory else []


def find_cores(request: FindFiles) -> list[FoundFile]:
    """Every core file of the owner that is not older than the job, newest first."""
    wall, found = clock.wall(), dict[str, FoundFile]()
    for directory, pattern in request.places:
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in islice(entries, MAX_ENTRIES):
                if not fnmatch.fnmatchcase(entry.name, pattern):
                    continue
                about = entry.stat(follow_symlinks=False)
                age_s = wall - about.st_mtime
                mine = about.st_uid == request.uid or f".{request.uid}." in entry.name
                if stat.S_ISREG(about.st_mode) and mine and age_s <= request.max_age_s and _is_core(entry):
                    found[entry.path] = FoundFile(
                        kind="core", path=entry.path, size_bytes=about.st_size, age_s=max(0.0, age_s)
                    )
    return sorted(found.values(), key=lambda each: each.age_s)[:MAX_FOUND]


def _is_core(entry: os.DirEntry[str]) -> bool:
    """Whether it begins as a core file does (ELF, type 4), or is one that was compressed by systemd."""
    if entry.name.endswith((".zst", ".lz4", ".xz")):
        return True
    with suppress(OSError), opened(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        head = os.read(fd, 18)
        return head[:4] == b"\x7fELF" and head[16:18] in (b"\x04\x00", b"\x00\x04")
    return False


def read_pattern() -> tuple[str, bool]:
    """(/proc/sys/kernel/core_pattern, whether the pid is appended); empty where it cannot be read."""
    try:
        uses_pid = Path("/proc/sys/kernel/core_uses_pid").read_text().strip() == "1"
        return Path("/proc/sys/kernel/core_pattern").read_text(), uses_pid
    except OSError:
        return "", False


STDERR = "stderr.log"
END_BYTES = 64 * 1024  # Of standard error.
KIND = "own_words"


def read_error_files(request: FindFiles, roots: Roots = MappingProxyType({})) -> list[FoundFile]:
    """Those that are there, belong to the owner and say why a rank ended: of each the first that says it."""
    found = []
    for path, rank in request.error_files:
        for each in (path, os.path.join(os.path.dirname(path), STDERR)):
            said, size, age_s = None, 0, -1.0
            with suppress(OSError, ValueError), _opened(request, roots, each, rank) as (fd, about):
                size, age_s = about.st_size, clock.wall() - about.st_mtime
                if each.endswith(STDERR):
                    said = parse_fatal_error(os.pread(fd, END_BYTES, max(0, size - END_BYTES)))
                else:
                    said = parse_error_file(os.pread(fd, MAX_BYTES + 1, 0)) if size else None
            if said is not None and age_s >= 0:  # a time in the future is an age that is not known
                found.append(FoundFile(kind=KIND, path=each, rank=rank, size_bytes=size, age_s=age_s, said=said))
                break
    return found


def find_files(request: FindFiles, worker: WorkerState) -> list[FoundFile]:
    """Flight Recorder dumps, error files and core files."""
    with roots_of(request.roots) as roots:
        return [*read_flight_recorders(request, roots), *read_error_files(request, roots), *find_cores(request)]
