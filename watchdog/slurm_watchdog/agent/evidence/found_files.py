"""Files that ranks leave behind, read as the job's owner: Flight Recorder dumps, error files, core files.

A job that has set up the pipe for it is asked for a fresh dump: PyTorch's monitor thread writes it, whatever the other
threads do. Nothing else of a job is touched. What ranks said of their own end is in the files that torchelastic names
to each: an exception in `error.json`, and faulthandler's words in `stderr.log` beside it, where a launcher redirects
standard error.
"""

from __future__ import annotations

import fnmatch
import os
import pwd
import re
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from slurm_watchdog.agent.children.requests import FindFiles, WorkerState
from slurm_watchdog.agent.files.job_root import Roots, open_in, root_of, roots_of, stat_in
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


def read_flight_recorders(request: FindFiles, roots: Roots = MappingProxyType({})) -> list[FoundFile]:
    """The dump of each rank that is there, belongs to the owner and is not older than the job; of ranks with a pipe,
    new ones. Of several of one rank the newest, of two that were written together the JSON."""
    asked_at = clock.wall()
    asked = {rank for path, rank in request.pipes if _ask(root_of(roots, rank), path, request.uid)}
    until = clock.monotonic() + FRESH_S
    while asked and clock.monotonic() < until and not asked <= _fresh(request, roots, asked_at):
        wait_readable((), LOOK_EVERY_S)
    left, wall = request.max_bytes, clock.wall()
    found = []
    for rank in dict.fromkeys(rank for _, rank, _ in request.files):
        mine = [(path, max_age_s) for path, of, max_age_s in request.files if of == rank]
        path, max_age_s = max(mine, key=lambda each: _written_at(request, roots, each[0], rank))
        room = min(left, MAX_KEPT_BYTES)
        each = _read(root_of(roots, rank), _at_home(path, request.uid), request.uid, rank or 0, max_age_s, room, wall)
        if each is not None:
            left -= len(each.content or b"")
            found.append(replace(each, rank=rank))
    return found


def _written_at(request: FindFiles, roots: Roots, path: str, rank: int | None) -> float:
    """When this file of the owner's was written (date), a JSON a little later; nothing else was ever written."""
    try:
        about = stat_in(root_of(roots, rank), _at_home(path, request.uid))
    except OSError:
        return float("-inf")
    own = stat.S_ISREG(about.st_mode) and about.st_uid == request.uid
    return about.st_mtime + (TOGETHER_S if path.endswith(".json") else 0.0) if own else float("-inf")


def _ask(root: int | None, path: str, uid: int) -> bool:
    """Whether someone reads from this pipe of the owner's, and was asked."""
    try:
        fd = open_in(root, path, os.O_WRONLY)
    except OSError:  # among others: no one reads from it
        return False
    with closing(fd):
        about = os.fstat(fd)
        if not stat.S_ISFIFO(about.st_mode) or about.st_uid != uid:
            return False
        try:
            return os.write(fd, b"1") == 1
        except OSError:
            return False


def _fresh(request: FindFiles, roots: Roots, since: float) -> set[int | None]:
    """The ranks whose dump was written since then, and is no longer written to."""
    found = set[int | None]()
    for path, rank, _ in request.files:
        try:
            at = stat_in(root_of(roots, rank), _at_home(path, request.uid)).st_mtime
        except OSError:
            continue
        if since - LOOK_EVERY_S <= at <= clock.wall() - LOOK_EVERY_S:
            found.add(rank)
    return found


def _at_home(path: str, uid: int) -> str:
    if not path.startswith("~/"):
        return path
    try:
        return pwd.getpwuid(uid).pw_dir + path[1:]
    except KeyError:
        return path


def _read(
    root: int | None, path: str, uid: int, rank: int, max_age_s: float, max_bytes: int, wall: float
) -> FoundFile | None:
    try:
        fd = open_in(root, path, os.O_RDONLY)
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
    wall = clock.wall()
    found: dict[str, FoundFile] = {}
    for directory, pattern in request.places:
        try:
            with os.scandir(directory) as entries:
                for number, entry in enumerate(entries):
                    if number >= MAX_ENTRIES:
                        break
                    if not fnmatch.fnmatchcase(entry.name, pattern):
                        continue
                    about = entry.stat(follow_symlinks=False)
                    age_s = wall - about.st_mtime
                    mine = about.st_uid == request.uid or f".{request.uid}." in entry.name
                    if stat.S_ISREG(about.st_mode) and mine and age_s <= request.max_age_s and _is_core(entry):
                        found[entry.path] = FoundFile(
                            kind="core", path=entry.path, size_bytes=about.st_size, age_s=max(0.0, age_s)
                        )
        except OSError:
            continue
    return sorted(found.values(), key=lambda each: each.age_s)[:MAX_FOUND]


def _is_core(entry: os.DirEntry[str]) -> bool:
    """Whether it begins as a core file does (ELF, type 4), or is one that was compressed by systemd."""
    if entry.name.endswith((".zst", ".lz4", ".xz")):
        return True
    try:
        with opened(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            head = os.read(fd, 18)
    except OSError:
        return False
    return head[:4] == b"\x7fELF" and head[16:18] in (b"\x04\x00", b"\x00\x04")


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
    """Those that are there, belong to the owner and say why a rank ended."""
    found = []
    for path, rank in request.error_files:
        root, beside = root_of(roots, rank), os.path.join(os.path.dirname(path), STDERR)
        each = _read_error_file(root, path, request.uid) or _read_error_file(root, beside, request.uid)
        if each is not None:
            found.append(replace(each, rank=rank))
    return found


def _read_error_file(root: int | None, path: str, uid: int) -> FoundFile | None:
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
        return [*read_flight_recorders(request, roots), *read_error_files(request, roots), *find_cores(request)]
