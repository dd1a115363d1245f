"""Opening files by names that others may change meanwhile: step by step, from one open directory to the next.

A link is read and never followed by the kernel. Root's own (a site's `/home -> /gpfs/home`) and those of the
user that this process is count; a link of anybody else ends the walk: who may write into a directory of a
group could lead the reader to a file that is the reader's alone. What is at the end is looked at before it is
opened, and it is that which is opened: no FIFO is woken up, no device touched.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.base.descriptors import closing, opened

MAX_LINKS = 40  # MAXSYMLINKS, linux/namei.h
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device",
}  # fmt: skip


class StrangeFileError(OSError):
    """It is there, and is not what is wanted: `strerror` says what it is."""


def open_log(path: str) -> int:
    """A regular file, to be read. Raises OSError, StrangeFileError if it is none or behind someone else's link."""
    with closing(walk(path)) as where:
        check_regular(os.fstat(where))
        # The same file once more, whatever its name stands for by now.
        return os.open(f"/proc/self/fd/{where}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def open_directory(path: str) -> int:
    """A directory, for work below it; its own name is no link. Raises OSError."""
    with closing(walk(path, follow_last=False)) as where:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where)


def check_regular(about: os.stat_result) -> None:
    """Raises StrangeFileError for what is not a regular file."""
    if not stat.S_ISREG(about.st_mode):
        kind = KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise StrangeFileError(None, f"it is {kind}, not a regular file")


def _step(part: str, where: int, inside: bool) -> int:
    """What `part` names in `where`, links themselves. A directory to go into is mounted if need be (autofs)."""
    if inside:
        try:
            return os.open(part, _STEP | os.O_DIRECTORY, dir_fd=where)
        except NotADirectoryError:
            pass  # a link, perhaps
    return os.open(part, _STEP, dir_fd=where)


def walk(path: str, root: int | None = None, *, follow_last: bool = True, any_links: bool = False) -> int:
    """A descriptor (O_PATH) of what `path` names; with `root` below that directory, above which nothing leads. Links of
    others count only with `any_links`. Raises OSError."""
    parts, links = _parts(path), 0
    way = [os.open("/", _STEP | os.O_DIRECTORY) if root is None else os.dup(root)]
    try:
        while parts:
            part = parts.pop(0)
            if part == "..":
                if len(way) > 1:
                    os.close(way.pop())
                continue
            way.append(_step(part, way[-1], inside=bool(parts)))
            about = os.fstat(way[-1])
            if not stat.S_ISLNK(about.st_mode) or (not parts and not follow_last):
                continue
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if not any_links and about.st_uid not in (0, os.geteuid()):
                text = f"a link on its way ({part!r}) is uid {about.st_uid}'s: it is not followed"
                raise StrangeFileError(None, text)
            target = os.readlink("", dir_fd=way[-1])
            os.close(way.pop())
            parts = _parts(target) + parts
            while target.startswith("/") and len(way) > 1:
                os.close(way.pop())
        return way.pop()
    finally:
        for each in way:
            os.close(each)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


# -- by the names that a job has for its files ---------------------------------------------------------------------
# A job may have a /tmp of its own (job_container/tmpfs), or a whole container: then a name means another file to it. It
# is looked up below the root of one of its processes, above which no link and no `..` leads.

Roots = Mapping[int | None, int | None]
"""Rank -> descriptor of the root below which its files are looked up, None for the agent's own; the rank None stands
for all that are not in it."""


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
    with suppress(OSError, ValueError), opened(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY) as root:
        same = os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        own = same and os.path.samestat(os.stat("/"), os.fstat(root))
        if read_stat(pid).start_ticks == start_ticks and not own:
            return os.dup(root)
    return None


def open_in(root: int | None, path: str, flags: int) -> int:
    """`path` (absolute), whose last name is no link; below `root` if that is given. Raises OSError."""
    directory, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with closing(walk(directory, root, any_links=True)) as where:
        return os.open(name, flags, dir_fd=where)
