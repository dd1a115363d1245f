"""Which file a page fault waits for: the kernel names none, so the process's mappings are looked at. For children only.

/proc/PID/maps takes the process's memory lock, as its command line does: a child that hangs on it is left,
and says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_watchdog.base.mounts import NOT_PROBED, Mount, mount_of, read_mounts, strip_deleted
from slurm_watchdog.knowledge.local_filesystems import LOCAL_TYPES
from slurm_watchdog.knowledge.syscalls import NOT_STORAGE
from slurm_watchdog.model.observations import CallTarget

MAX_MAPS = 8 << 20  # Bytes of the table: a trainer has 2,000 to 20,000 lines of a hundred.
MAX_CANDIDATES = 8
_LINE = re.compile(r"[0-9a-f]+-[0-9a-f]+ ..(.). [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9]\d* +(/.*)")
"""Permissions and name of a mapping that has an inode; proc(5)."""


def parse_maps(text: str) -> dict[str, bool]:
    """The files on some filesystem that are mapped, in the order of the table, and whether any part of each
    is executable."""
    found: dict[str, bool] = {}
    for line in text.split("\n"):
        match = _LINE.fullmatch(line)
        if match is None or match[2].startswith(NOT_STORAGE):
            continue
        path = strip_deleted(match[2].replace("\\012", "\n"))
        found[path] = found.get(path, False) or match[1] == "x"
    return found


def fault_target(files: Iterable[tuple[str, bool]], mounts: Iterable[Mount]) -> CallTarget:
    """What a page fault may be about; only `candidates` where it may be several filesystems.

    Filesystems with a server come first: a local disk that hangs takes the whole node with it. On one
    filesystem a file of data comes before programs and libraries, which are read once, at the start; of
    several files none is named.
    """
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
