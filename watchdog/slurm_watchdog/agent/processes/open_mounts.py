"""Which logs processes have open, and on which filesystems files of theirs are open or mapped: for a child, which may
hang on a process without harm.

A data set lies where no log and no checkpoint does, and its filesystem fails as well. Nothing is opened or
looked up: names come from the links in /proc/PID/fd and from /proc/PID/maps (whose descriptors may be closed
long since), mounts from mountinfo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

from slurm_watchdog.agent.children.answers import OpenFiles
from slurm_watchdog.agent.children.become_user import check_process
from slurm_watchdog.agent.children.requests import ListOpenFiles, ReadSharedMemory, WorkerState
from slurm_watchdog.agent.proc.files import MAX_LINKS, read_file
from slurm_watchdog.agent.proc.system_call import is_storage
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.base.mounts import NOT_PROBED, Mount, mount_of, read_mounts, strip_deleted
from slurm_watchdog.knowledge.syscalls import LOCAL_TYPES, NOT_STORAGE
from slurm_watchdog.model.observations import CallTarget, Role

MAX_MAPS = 8 << 20  # Bytes of the table: a trainer has 2,000 to 20,000 lines of a hundred.
MAX_CANDIDATES = 8
LOG_SUFFIXES = (".log", ".out", ".txt", ".jsonl", ".err")
_LINE = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ..(.). [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9]\d* +(/.*)$", re.MULTILINE)
"""Permissions and name of a mapping that has an inode; proc(5)."""


def parse_maps(text: str) -> dict[str, bool]:
    """The files that are mapped, in the order of the table, and whether any part of each is executable."""
    found: dict[str, bool] = {}
    for executable, name in _LINE.findall(text):
        if not name.startswith(NOT_STORAGE):
            path = strip_deleted(name.replace("\\012", "\n"))
            found[path] = found.get(path, False) or executable == "x"
    return found


def fault_target(files: Iterable[tuple[str, bool]], mounts: Iterable[Mount]) -> CallTarget:
    """What a page fault may be about; only `candidates` where it may be several filesystems. Filesystems with a server
    come first: a local disk that hangs takes the whole node with it. On one filesystem a file of data comes before
    programs and libraries, which are read once, at the start; of several files none is named."""
    table = tuple(mounts)
    by_mount: dict[str, tuple[Mount, list[tuple[str, bool]]]] = {}
    for path, executable in files:
        mount = mount_of(path, table)
        if mount is not None and mount.fs_type not in NOT_PROBED:
            by_mount.setdefault(mount.point, (mount, []))[1].append((path, executable))
    far = {point: each for point, each in by_mount.items() if each[0].fs_type not in LOCAL_TYPES}
    possible = far or by_mount
    if len(possible) != 1:
        return CallTarget(candidates=tuple(sorted(possible)[:MAX_CANDIDATES]))
    ((mount, mapped),) = possible.values()
    data = [path for path, executable in mapped if not executable]
    named = data if len(data) == 1 else [path for path, _ in mapped if len(mapped) == 1]
    return CallTarget(named[0] if named else None, mount.point, mount.fs_type, mount.device)


def read_mapped(pid: int) -> dict[str, None]:
    """Names of the files that a process has mapped. Raises OSError."""
    return dict.fromkeys(_read_maps(str(pid)))


def read_fault(task: str) -> CallTarget:
    """`fault_target` of a thread, given as `PID/task/TID`. Raises OSError."""
    return fault_target(_read_maps(task).items(), read_mounts(task))


def _read_maps(task: str) -> dict[str, bool]:
    with open(f"/proc/{task}/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return parse_maps(file.read(MAX_MAPS))


def list_open_files(request: ListOpenFiles, state: WorkerState) -> dict[str, OpenFiles]:
    """What processes have open, or mapped, by job. Logs are what is open for writing as descriptor 1 or 2; of others
    than workers also for appending, or under a name with one of LOG_SUFFIXES. Mount points, those of others than
    helpers, are the agent's own: filesystems that have no one behind them who could fail (NOT_PROBED), `/` and what an
    ordinary user serves are left out. A process that ended, or that may not be looked into, adds nothing."""
    own = read_mounts()
    tables: dict[str, tuple[Mount, ...]] = {_namespace("self"): own}
    logs: dict[str, dict[str, None]] = {}
    points: dict[str, dict[str, None]] = {}
    for index, (job_id, pid, role, mapped) in enumerate(request.processes):
        state.note(index)
        mine, used = logs.setdefault(job_id, {}), points.setdefault(job_id, {})
        try:
            check_process(pid, state.own)
            with opened(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY) as where:
                paths = _open_paths(where)
                named = paths if role is not Role.WORKER else [fd for fd in ("1", "2") if fd in paths]
                mine |= {paths[fd]: None for fd in named if _is_log(pid, fd, paths[fd])}
            if role is Role.HELPER:
                continue
            namespace = _namespace(pid)
            if namespace not in tables:
                tables[namespace] = read_mounts(pid)
            files = {*map(strip_deleted, paths.values()), *(read_mapped(pid) if mapped else ())}
            used |= dict.fromkeys(points_of(files, tables[namespace], own))
        except (OSError, ValueError):
            continue
    return {job_id: OpenFiles(tuple(mine), tuple(points[job_id])) for job_id, mine in logs.items()}


def _open_paths(where: int) -> dict[str, str]:
    """Of each descriptor the name of its file, where that is storage. `where` is an open /proc/PID/fd: walking the
    whole path for each of hundreds would double the cost. Nothing is opened or looked up."""
    found = {}
    for fd in os.listdir(where)[:MAX_LINKS]:
        with suppress(OSError):  # it was closed meanwhile
            if is_storage(path := os.readlink(fd, dir_fd=where)):
                found[fd] = path
    return found


def _is_log(pid: int, fd: str, path: str) -> bool:
    if path.endswith(" (deleted)"):
        return False
    try:
        flags = parse_fd_flags(read_file(f"/proc/{pid}/fdinfo/{fd}"))
    except OSError:
        return False
    wanted = fd in ("1", "2") or bool(flags & os.O_APPEND) or path.endswith(LOG_SUFFIXES)
    return wanted and bool(flags & (os.O_WRONLY | os.O_RDWR))


def parse_fd_flags(text: bytes) -> int:
    """The flags that a file was opened with, from /proc/PID/fdinfo/FD (octal there); 0 where they are missing."""
    for line in text.splitlines():
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8)
    return 0


def points_of(paths: Iterable[str], table: tuple[Mount, ...], own: tuple[Mount, ...]) -> list[str]:
    """Mount points in `own` of the filesystems that `paths` lie on, as `table`, that of the process, has them. A
    container mounts a directory of a filesystem elsewhere: there its source and type say which one of `own` it is."""
    sources, by_point = _by_source(own), {each.point: each for each in table}
    found: dict[str, None] = {}
    for directory in {os.path.dirname(path) for path in paths}:
        while directory not in by_point and len(directory) > 1:  # A user's table may have thousands of rows.
            directory = os.path.dirname(directory)
        mount = by_point.get(directory)
        if mount is None or mount.fs_type in NOT_PROBED or mount.owner is not None:
            continue
        point = mount.point if mount in own else sources.get((mount.fs_type, mount.device))
        if point is not None and point != "/":
            found[point] = None
    return sorted(found)


def _by_source(mounts: Iterable[Mount]) -> Mapping[tuple[str, str], str]:
    """Type and device -> mount point; what is mounted twice, where it was mounted first."""
    found: dict[tuple[str, str], str] = {}
    for mount in mounts:
        found.setdefault((mount.fs_type, mount.device), mount.point)
    return found


def _namespace(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/mnt")


PLACE = "/dev/shm"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


def read_shared_memory(request: ReadSharedMemory, state: WorkerState) -> list[tuple[int, int] | None]:
    """Of each process (bytes in use, size) of its /dev/shm; None where that is the node's, none, or not to be seen."""
    try:
        nodes = os.stat(PLACE).st_dev
    except OSError:  # the node has none
        nodes = None
    return [_of(pid, nodes, state) for pid in state.each(request.pids)]


def _of(pid: int, nodes: int | None, state: WorkerState) -> tuple[int, int] | None:
    try:
        check_process(pid, state.own)
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
