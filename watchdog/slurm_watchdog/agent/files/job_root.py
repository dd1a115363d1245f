"""Files of a job by the names that its own processes have for them.

A job may have a /tmp of its own (job_container/tmpfs of Slurm), or a whole container: then a name means another file to
it than to the agent. It is looked up below the root of one of its processes, step by step and in no other: a link, or
`..`, leads nowhere above that root. A process that the reader may not look into, or whose root is the agent's, changes
nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from slurm_watchdog.agent.files.safe_open import walk
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.base.descriptors import closing

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


Roots = Mapping[int | None, int | None]
"""Rank -> descriptor of the root below which its files are looked up, None for the agent's own; the rank None stands
for all that are not in it."""


def root_of(roots: Roots, rank: int | None) -> int | None:
    return roots.get(rank, roots.get(None))


@contextmanager
def roots_of(processes: Iterable[tuple[int | None, int, int]]) -> Iterator[Roots]:
    """Given (rank, pid, start ticks) of processes; open for the block."""
    with ExitStack() as stack:
        found: dict[int | None, int | None] = {}
        for rank, pid, start_ticks in processes:
            found[rank] = root = other_root(pid, start_ticks)
            if root is not None:
                stack.callback(os.close, root)
        yield found


def other_root(pid: int, start_ticks: int) -> int | None:
    """A descriptor (O_PATH) of the root of this process; None where it is the agent's own, or can't be told."""
    try:
        root = os.open(f"/proc/{pid}/root", _DIRECTORY)
    except OSError:
        return None
    try:
        own, its = os.stat("/"), os.fstat(root)
        same = os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        if read_stat(pid).start_ticks == start_ticks and not (same and os.path.samestat(own, its)):
            return root
    except (OSError, ValueError):
        pass
    os.close(root)
    return None


def open_in(root: int | None, path: str, flags: int) -> int:
    """`path` (absolute), whose last name is no link; below `root` if that is given. Raises OSError."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if root is None:
        return os.open(path, flags)
    with _parent(root, path) as (where, name):
        return os.open(name, flags, dir_fd=where)


def stat_in(root: int | None, path: str) -> os.stat_result:
    """Of `path` as `open_in` finds it, or of the link there. Raises OSError."""
    if root is None:
        return os.lstat(path)
    with _parent(root, path) as (where, name):
        return os.stat(name, dir_fd=where, follow_symlinks=False)


@contextmanager
def _parent(root: int, path: str) -> Iterator[tuple[int, str]]:
    """The directory of `path` below `root`, and its last name there. Raises OSError."""
    directory, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    with closing(walk(directory, root, any_links=True)) as where:
        yield where, name
