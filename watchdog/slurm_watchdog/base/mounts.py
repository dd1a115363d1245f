"""Mounts, and which one a path is on, from mountinfo alone: no filesystem but /proc is touched."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_watchdog.base.late_regex import late_regex

_OCTAL = late_regex(r"\\([0-7]{3})")
_USER_ID = late_regex(r"(?:^|,)user_id=(\d{1,10})(?:,|$)")
DELETED = " (deleted)"  # What the kernel appends to the name of a file that was unlinked.


_NOT_PROBED = """
    autofs bdev binder binfmt_misc bpf cgroup cgroup2 configfs cpuset debugfs devfs devpts devtmpfs efivarfs fusectl
    hugetlbfs mqueue nsfs overlay pipefs proc pstore ramfs rootfs rpc_pipefs securityfs selinuxfs sockfs squashfs sysfs
    tmpfs tracefs
"""
NOT_PROBED = frozenset(_NOT_PROBED.split())
"""Types without a server that could fail to answer: the kernel's own, memory, images, and layers over another
mount (the root of a node without a disk, of a container). An autofs that is still one has nothing mounted on it:
touching it would mount something that no job asked for. Names from /proc/filesystems and filesystems(5)."""


MAX_OF_USERS = 512
"""Filesystems of users that are kept: each may mount 1,000 (mount_max of fuse.conf), and all are compared."""


@dataclass(frozen=True)
class Mount:
    point: str
    fs_type: str
    device: str
    owner: int | None = None  # The user whose own program serves it (FUSE, `user_id=`): nothing of ours touches it.
    number: int = field(default=0, compare=False)  # The kernel's, the `mnt_id` of files on it.


def read_mounts(pid: int | str = "self") -> tuple[Mount, ...]:
    """The mounts of a process's namespace. Can block behind a mount that hangs: for children, or once at the start."""
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return parse_mountinfo(file.read())


class MountNews:
    """Whether mounts have changed since the last call, without reading them: the kernel marks the open table
    (proc(5), poll of mountinfo). Where it cannot be opened, always yes."""

    def __init__(self, path: str = "/proc/self/mountinfo") -> None:
        self._poll = select.poll()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        else:
            self._poll.register(self._fd, select.POLLPRI)

    def __call__(self) -> bool:
        return self._fd < 0 or bool(self._poll.poll(0))

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts in the text of /proc/PID/mountinfo (see proc(5)), in its order; lines it does not understand
    are left out, and what is served by users beyond MAX_OF_USERS."""
    mounts: list[Mount] = []
    of_users = 0
    for line in text.split("\n"):  # names may hold what else ends a line to Python; of blanks the kernel escapes all
        fields = line.split(" ")
        try:
            separator = fields.index("-", 6)
            mounts.append(
                Mount(
                    _unescape(fields[4]),
                    fields[separator + 1],
                    _unescape(fields[separator + 2]),
                    _server_of(fields[separator + 1], fields[separator + 3]),
                    int(fields[0]),
                )
            )
        except (ValueError, IndexError):
            continue
        of_users += mounts[-1].owner is not None
        if of_users > MAX_OF_USERS and mounts[-1].owner is not None:
            mounts.pop()
    return tuple(mounts)


def _server_of(fs_type: str, options: str) -> int | None:
    """The user, root aside, who serves a FUSE filesystem; its type may be called anything behind `fuse.`."""
    match = _USER_ID.search(options) if fs_type.startswith("fuse") else None
    return int(match[1]) if match is not None and int(match[1]) else None


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text) if "\\" in text else text


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount with the longest matching point; of several on one point the last, which covers the others."""
    best = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        if (path == point or path.startswith(point + "/")) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def strip_deleted(path: str) -> str:
    """`/a/b (deleted)` as the kernel names an unlinked file, without the remark."""
    return path.removesuffix(DELETED)
