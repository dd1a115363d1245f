"""Files of one checkpoint: whether each has its end, how many bytes they are, and whether they change. For children.

Names are relative to an open directory, and no link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from slurm_watchdog.agent.children.answers import Footprint
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.knowledge.checkpoint_layouts import SETTLES, Candidate, has_zip_end, markers_of

MAX_FILES = 2000  # Of a checkpoint whose bytes are added up, once: 500 GB in shards of 250 MB; of more no size is said.
MAX_FOOTPRINT_FILES = 500  # Of one that is not complete, at each look: enough to see that it grows.
MAX_NAMES = 64
MAX_DEPTH = 3
MAX_SMALL = 256
MAX_LINKS = 40  # linux/namei.h, MAXSYMLINKS
MAX_HEADER = 8 << 20  # Of a safetensors file: its table of tensors, which is some 100 bytes a tensor.

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_OFFSETS = re.compile(rb'"data_offsets":\s*\[\d+,\s*(\d{1,18})\]')
SHARD = ".distcp"
_ARCHIVES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def stat_of(name: str, where: int) -> os.stat_result | None:
    """What a name is, links themselves; None if it is not there."""
    try:
        return os.stat(name, dir_fd=where, follow_symlinks=False)
    except OSError:
        return None


def read_small(name: str, where: int | None, flags: int = FILE_FLAGS) -> tuple[str, int] | None:
    """Text and time (nanoseconds since the epoch) of a small file; None if it is not there or no plain file."""
    with suppress(OSError), opened(name, flags, where) as fd:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            return os.read(fd, MAX_SMALL).decode(errors="replace"), found.st_mtime_ns
    return None


def marker_is_whole(name: str, where: int) -> bool:
    """Whether a marker is there; one that is itself written in pieces counts when its end is there."""
    with suppress(OSError), opened(name, FILE_FLAGS, where) as fd:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return False
        if name.endswith(".json"):
            return os.pread(fd, 16, max(0, found.st_size - 16)).rstrip().endswith((b"}", b"]"))
        return found.st_size > 0 or name.endswith(("/complete", "/commit_success.txt"))
    return False


def files_are_whole(names: tuple[str, ...], where: int) -> bool | None:
    """Whether every file of a step has its end; None where the format does not say."""
    answers = [_file_is_whole(name, where) for name in names[:MAX_NAMES]]
    return False if False in answers else None if None in answers else True


def _file_is_whole(name: str, where: int) -> bool | None:
    try:
        with opened(name, FILE_FLAGS, where) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size == 0:
                return False
            head = os.pread(fd, 8, 0)
            if head.startswith(b"PK\x03\x04"):
                return found.st_size > 22 and has_zip_end(os.pread(fd, 22, found.st_size - 22))
            if name.endswith(".safetensors"):
                return _safetensors_is_whole(fd, int.from_bytes(head, "little"), found.st_size)
            return None
    except OSError:
        return False


def _safetensors_is_whole(fd: int, header_bytes: int, size_bytes: int) -> bool | None:
    """By the offsets in its header, which name the end of the last tensor."""
    if header_bytes > MAX_HEADER:
        return None
    ends = (int(end) for end in _OFFSETS.findall(os.pread(fd, header_bytes, 8)))
    return size_bytes >= 8 + header_bytes + max(ends, default=0)


def may_settle(name: str, where: int) -> bool:
    """Whether a directory may count as complete once it does not change any more. Not so with shards of PyTorch DCP, of
    which .metadata is missing then, nor with a file that is visibly cut short: a leftover of a crash does not change
    any more, either."""
    with suppress(OSError), opened(name, DIRECTORY_FLAGS, where) as fd:
        names = _first_names(fd)
        archives = [each for each in names if each.endswith(_ARCHIVES)][:MAX_NAMES]
        unfinished = any(each.endswith((SHARD, ".tmp", ".part", ".incomplete")) for each in names)
        return not unfinished and files_are_whole(tuple(archives), fd) is not False
    return False


def has_shards(name: str, where: int) -> bool:
    """Whether a directory holds shards of PyTorch DCP."""
    with suppress(OSError), opened(name, DIRECTORY_FLAGS, where) as fd:
        return any(each.endswith(SHARD) for each in _first_names(fd))
    return False


def _first_names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in islice(entries, MAX_FOOTPRINT_FILES)]


def take_footprint(candidate: Candidate, where: int, most: int, check_time: Callable[[], None]) -> Footprint:
    """Files, bytes and newest change of all that a candidate consists of, at most `most` files and directories."""
    count = size_bytes = newest_ns = seen = 0
    whole = len(candidate.names) <= MAX_NAMES
    walks = (_walk(name, where, MAX_DEPTH, check_time) for name in candidate.names[:MAX_NAMES])
    for it in islice(chain.from_iterable(walks), most + 1):
        seen += 1
        if it is None or seen > most:
            whole = False
            continue
        newest_ns = max(newest_ns, it.st_mtime_ns)
        if stat.S_ISREG(it.st_mode):
            count, size_bytes = count + 1, size_bytes + it.st_size
    return Footprint(count, size_bytes, newest_ns, whole=whole)


def _walk(name: str, where: int, depth: int, check_time: Callable[[], None]) -> Iterator[os.stat_result | None]:
    """What is known of all that lies below a name, itself included; None where something is passed over."""
    it = stat_of(name, where)
    if it is None:
        return
    yield it
    if stat.S_ISDIR(it.st_mode):
        check_time()
        try:
            with opened(name, DIRECTORY_FLAGS, where) as fd, os.scandir(fd) as entries:
                for entry in entries if depth else ():
                    yield from _walk(entry.name, fd, depth - 1, check_time)
        except FileNotFoundError:
            return  # gone meanwhile
        except OSError:
            yield None
        if not depth:
            yield None


def resolve(path: str, mount: str, others: frozenset[str] = frozenset()) -> tuple[str, bool]:
    """`path` without links, each read and none followed, and whether that is on `mount` and none of the `others` below
    it. As soon as a link leads away from the mount it ends, for to look further would be to touch another filesystem:
    then the path may still have links. Raises OSError."""
    real, links = mount.rstrip("/"), 0
    if not is_inside(path, mount, others):
        return path, False
    parts = [part for part in path[len(real) :].split("/") if part]
    while parts:
        part = parts.pop(0)
        if part in (".", ".."):
            real = os.path.dirname(real) if part == ".." else real
            if not is_inside(real or "/", mount, others):
                return "/".join([real, *parts]), False
            continue
        if not is_inside(f"{real}/{part}", mount, others):
            return "/".join([real, part, *parts]), False
        if not stat.S_ISLNK(os.lstat(f"{real}/{part}").st_mode):
            real = f"{real}/{part}"
            continue
        target = os.readlink(f"{real}/{part}")
        if (links := links + 1) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        parts = [each for each in target.split("/") if each] + parts
        if target.startswith("/"):
            real, above = mount.rstrip("/"), [each for each in mount.split("/") if each]
            if parts[: len(above)] != above:
                return "/" + "/".join(parts), False
            parts = parts[len(above) :]
    return real or "/", True


def is_inside(path: str, mount: str, others: frozenset[str]) -> bool:
    inside = path == mount or path.startswith(mount.rstrip("/") + "/")
    return inside and not any(path == other or path.startswith(f"{other}/") for other in others)


MAX_ENTRIES = 10_000  # Names that one look at a directory reads: 5 ms here, and one to ten requests to a file server.
MAX_FOOTPRINTS = 16  # Of those that are not complete so many are looked into.
WAS_COMPLETE = -1  # In the place of a number of files: no one looked into it, for it was complete.
UNMEASURED = -1
SETTLES_S = 20.0  # What has not changed for so long, from look to look, has settled.
SETTLED_S = 300.0  # At the first look, what no one has written to for so long by the times of its files.


class TooLongError(Exception):
    """The time for this look is over."""


class Tracked(NamedTuple):
    """What a tracker says: the step of the newest complete checkpoint of these layouts, and when it was written."""

    name: str
    layouts: tuple[str, ...]
    step: int
    at_ns: int


@dataclass(frozen=True)
class Assessed:
    """One candidate: whether it is complete, of what layout, and when it became so."""

    path: str
    candidate: Candidate
    layout: str
    complete: bool = False
    at_ns: int = 0
    footprint: Footprint | None = None  # None: not looked into.


@dataclass
class Scan:
    """One scan of one directory. `before` has the footprints of the scan before, by path; None at the first."""

    now: float
    wall: float
    ends_at: float
    before: dict[str, Footprint] | None
    others: frozenset[str]  # Points of other mounts: nothing there is touched.
    entries_left: int = MAX_ENTRIES
    notes: list[str] = field(default_factory=list)
    footprints: dict[str, Footprint] = field(default_factory=dict)  # For the next scan.

    def check_time(self) -> None:
        if clock.monotonic() > self.ends_at:
            raise TooLongError


def assess(where: int, prefix: str, candidate: Candidate, tracked: list[Tracked], this: Scan) -> Assessed | None:
    """What one candidate is; None if it is gone meanwhile."""
    this.check_time()
    name = candidate.names[0]
    it = stat_of(name, where)
    if it is None:
        return None
    assessed = Assessed(f"{prefix}/{name}", candidate, candidate.layout, at_ns=it.st_mtime_ns)
    if candidate.is_directory and not candidate.unfinished:
        told = next((each for each in tracked if candidate.layout in each.layouts), None)
        if told is not None:
            if candidate.order[0] <= told.step:
                at_ns = told.at_ns if candidate.step == told.step else it.st_mtime_ns
                return replace(assessed, complete=True, at_ns=at_ns)
        else:
            for layout, marker in markers_of(candidate.layout):
                found = stat_of(f"{name}/{marker}", where)
                if found is not None and marker_is_whole(f"{name}/{marker}", where):
                    return replace(assessed, layout=layout, complete=True, at_ns=found.st_mtime_ns)
    return _assess_by_change(where, assessed, this)


def _assess_by_change(where: int, assessed: Assessed, this: Scan) -> Assessed:
    """A candidate without a marker: its files are complete if they have their ends, or do not change any more."""
    candidate = assessed.candidate
    if candidate.layout == "digits" and not has_shards(candidate.names[0], where):
        return assessed  # a date, the number of a run
    whole = None if candidate.is_directory else files_are_whole(candidate.names, where)
    if whole and not candidate.unfinished:
        return replace(assessed, complete=True, at_ns=_newest_ns(candidate, where, assessed.at_ns))
    if sum(each.files != WAS_COMPLETE for each in this.footprints.values()) >= MAX_FOOTPRINTS:
        return assessed
    taken = take_footprint(candidate, where, MAX_FOOTPRINT_FILES, this.check_time)
    since = _unchanged_since(assessed.path, taken, this)
    this.footprints[assessed.path] = msgspec.structs.replace(taken, since=since)
    assessed = replace(assessed, at_ns=taken.newest_ns, footprint=taken)
    settles = candidate.layout in SETTLES if candidate.is_directory else whole is None
    if candidate.layout == "numbered":
        settles = may_settle(candidate.names[0], where)
        assessed = replace(assessed, layout="plain" if settles else "dcp")
    settled = settles and since < this.now and this.now - since >= SETTLES_S
    complete = settled and not candidate.unfinished and taken.size_bytes > 0
    return replace(assessed, complete=complete)


def _unchanged_since(path: str, taken: Footprint, this: Scan) -> float:
    """Since when, on our clock, it has been as it is now, as far as is known."""
    if this.before is None:
        return this.now - SETTLES_S - 1 if this.wall - taken.newest_ns / 1e9 > SETTLED_S else this.now
    then = this.before.get(path)
    return then.since if then is not None and taken.equals(then) else this.now


def _newest_ns(candidate: Candidate, where: int, at_ns: int) -> int:
    times = [it.st_mtime_ns for name in candidate.names[:MAX_NAMES] if (it := stat_of(name, where)) is not None]
    return max([at_ns, *times])


def is_newer(one: Assessed, complete: Assessed | None) -> bool:
    """Whether `one` is newer than the newest complete one: by its number, or without one by its time."""
    if complete is None:
        return True
    if one.candidate.step is None or complete.candidate.step is None:
        return one.at_ns > complete.at_ns
    return one.candidate.order > complete.candidate.order


def newest(assessed: Iterable[Assessed]) -> Assessed | None:
    """The newest complete one: by number within a layout and a directory, by time between them. Where a tracker speaks
    for a layout, it alone decides, for the trainer resumes from what it says: what has a higher number is not complete.
    A file without a number in its name counts only where nothing else is complete."""
    best: dict[tuple[str, str], Assessed] = {}
    for each in assessed:
        key = (os.path.dirname(each.path), each.layout)
        if each.complete and (key not in best or _rank(each) > _rank(best[key])):
            best[key] = each
    numbered = [each for each in best.values() if each.candidate.order > (0, 0)]
    return max(numbered or best.values(), key=lambda each: each.at_ns, default=None)


def _rank(assessed: Assessed) -> tuple[tuple[int, int], int]:
    return assessed.candidate.order, assessed.at_ns


def has_changed(one: Assessed, before: dict[str, Footprint] | None) -> bool:
    """Whether it grew, changed or appeared since the look before; at the first look no one can say."""
    if before is None or one.footprint is None:
        return False
    then = before.get(one.path)
    if then is not None and then.files == WAS_COMPLETE:  # a directory's own time says little
        return not one.candidate.is_directory and then.newest_ns < one.footprint.newest_ns
    return then is None or not one.footprint.equals(then)
