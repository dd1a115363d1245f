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

from slurm_watchdog.base.descriptors import closing

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
