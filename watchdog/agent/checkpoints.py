"""Looks at directories of checkpoints, in a child that is the job's owner, on the one mount that the child is for.

Everything is bounded: entries, depth, files, time. Links are not followed, with one exception: the directory itself may
be named through links, and if these lead to another mount, the caller is told where and asks that mount's child.
The child remembers nothing: what has to be compared with the look before comes with the question and goes back.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from watchdog import clock
from watchdog.agent import checkpoint_files as files
from watchdog.agent.checkpoint_files import DIRECTORY_FLAGS, MAX_FILES, MAX_PRINT_FILES, Print
from watchdog.agent.probe import describe
from watchdog.knowledge.checkpoint_layouts import (
    SETTLES,
    TRACKED_NAMES,
    TRACKERS,
    Candidate,
    markers_of,
    parse_tracker,
    recognise,
)

MAX_ENTRIES = 10_000
"""Names that one look at a directory reads: 5 ms here, and one to ten requests to a file server."""
MAX_JUDGED = 12
"""Of the newest of each layout and directory: more leftovers of crashes than that are a case for a person."""
MAX_PRINTS = 16
"""Of those that are not complete so many are looked into."""
WAS_COMPLETE = -1
"""In the place of a number of files: nobody looked into it, for it was complete."""
MAX_SUBDIRECTORIES = 8
MAX_LINKS = 40  # linux/namei.h, MAXSYMLINKS
SETTLED_S = 300.0
"""What nobody has written to for so long is taken for settled at the first look already."""
INSIDE = "checkpoints"
"""The subdirectory that Lightning, NeMo and MaxText put below a run's own directory."""


class TooLongError(Exception):
    """The time for this look is over."""


class Tracked(NamedTuple):
    """What a tracker says: the step of the newest complete checkpoint of these layouts, and when it was written."""

    name: str
    layouts: tuple[str, ...]
    step: int
    at_ns: int


@dataclass(frozen=True)
class Judged:
    """One candidate: whether it is complete, of what layout, and when it became so."""

    path: str
    candidate: Candidate
    layout: str
    complete: bool = False
    at_ns: int = 0
    print: Print | None = None
    """None: not looked into."""


@dataclass
class _Look:
    """One look at one directory. `before` has the prints of the look before, by path; None at the first."""

    ends_at: float
    wall: float
    before: dict[str, list[int]] | None
    others: frozenset[str]
    """Points of other mounts: nothing there is touched."""
    entries_left: int = MAX_ENTRIES
    notes: list[str] = field(default_factory=list)
    prints: dict[str, list[int]] = field(default_factory=dict)
    """For the next look."""

    def check_time(self) -> None:
        if clock.monotonic() > self.ends_at:
            raise TooLongError


def look(args: Any, state: dict[str, Any]) -> dict[str, Any]:
    """One look at the directories and trackers of this child's mount.

    Given {"mount", "others": mount points below it, "budget_s", "directories": [[job, directory, before]…], "trackers":
    [[job, path]…]}. `before` is None at the first look, then what the last one gave back. Returns {"directories": [{job,
    directory, before, error, moved, and unless there is an error: layout, step, path, at_ns, age_s, size_bytes,
    writing_step, writing, writing_bytes}…], "trackers": [{job, path, step, age_s}…]}. `moved` is where the directory
    lies, if that is another mount; a tracker is left out while it says no step.
    """
    wall, ends_at = clock.wall(), clock.monotonic() + args["budget_s"]
    others = frozenset(args["others"])
    rows = []
    for job, directory, before in args["directories"]:
        memory = before or {}
        this = _Look(ends_at, wall, memory.get("prints") if before is not None else None, others)
        row: dict[str, Any] = {
            "job": job,
            "directory": directory,
            "before": before,
            "error": None,
            "moved": None,
        }
        try:
            real, inside = resolve(directory, args["mount"], others)
            row |= _look_at(real, this, memory.get("size")) if inside else {"moved": real}
        except TooLongError:
            row["error"] = f"there was more to look at than {args['budget_s']:g} s allow"
        except OSError as problem:
            row["error"] = describe(problem)
        rows.append(row)
    trackers = [found for job, path in args["trackers"] if (found := _read_given_tracker(job, path, wall))]
    return {"directories": rows, "trackers": trackers}


def resolve(path: str, mount: str, others: frozenset[str] = frozenset()) -> tuple[str, bool]:
    """`path` without links, each read and none followed, and whether that is on `mount` and none of the `others` below it.

    As soon as a link leads away from the mount it ends, for to look further would be to touch another filesystem: then
    the path may still have links. Raises OSError.
    """
    real, links = mount.rstrip("/"), 0
    if not _is_inside(path, mount, others):
        return path, False
    parts = [part for part in path[len(real) :].split("/") if part]
    while parts:
        part = parts.pop(0)
        if part in (".", ".."):
            real = os.path.dirname(real) if part == ".." else real
            if not _is_inside(real or "/", mount, others):
                return "/".join([real, *parts]), False
            continue
        if not _is_inside(f"{real}/{part}", mount, others):
            return "/".join([real, part, *parts]), False
        target = _read_link(f"{real}/{part}")
        if target is None:
            real = f"{real}/{part}"
            continue
        if (links := links + 1) > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        parts = [each for each in target.split("/") if each] + parts
        if target.startswith("/"):
            real, above = mount.rstrip("/"), [each for each in mount.split("/") if each]
            if parts[: len(above)] != above:
                return "/" + "/".join(parts), False
            parts = parts[len(above) :]
    return real or "/", True


def _read_link(path: str) -> str | None:
    """Where a link points to; None if it is none. Raises OSError if nothing is there."""
    try:
        return os.readlink(path)
    except OSError as problem:
        if problem.errno == errno.EINVAL:
            return None
        raise


def _is_inside(path: str, mount: str, others: frozenset[str]) -> bool:
    inside = path == mount or path.startswith(mount.rstrip("/") + "/")
    return inside and not any(path == other or path.startswith(f"{other}/") for other in others)


def _look_at(directory: str, this: _Look, size: list[Any] | None) -> dict[str, Any]:
    judged = _search(directory, this)
    complete = newest(judged)
    rest = [each for each in judged if not each.complete and is_newer(each, complete)]
    growing = [each for each in rest if _changed(each, this.before)]
    writing = next(iter(growing or rest), None)
    layout = complete.layout if complete else writing.layout if writing else None
    found: dict[str, Any] = {"layout": layout, "step": None, "path": None, "at_ns": None, "age_s": None}
    found |= {"size_bytes": None, "writing": bool(growing), "writing_step": None, "writing_bytes": None}
    if complete is not None:
        size = _size(complete, this, size)
        age_s = max(0.0, this.wall - complete.at_ns / 1e9)
        found |= {"step": complete.candidate.step, "path": complete.path, "at_ns": complete.at_ns}
        found |= {"age_s": age_s, "size_bytes": size[2]}
    if writing is not None:
        found["writing_step"] = writing.candidate.step
        if writing.print is not None and writing.print.whole:
            found["writing_bytes"] = writing.print.size_bytes
    found["error"] = "; ".join(this.notes) or None
    found["before"] = {"prints": this.prints, "size": size if complete is not None else None}
    return found


def _size(complete: Judged, this: _Look, known: list[Any] | None) -> list[Any]:
    """[path, when complete, bytes or None]: added up once for each checkpoint."""
    if known is not None and known[:2] == [complete.path, complete.at_ns]:
        return known
    where = os.open(os.path.dirname(complete.path), DIRECTORY_FLAGS)
    try:
        total = files.take_print(complete.candidate, where, MAX_FILES, this.check_time)
    finally:
        os.close(where)
    return [complete.path, complete.at_ns, total.size_bytes if total.whole else None]


# ---------------------------------------------------------------------------------------------- where to look


def _search(directory: str, this: _Look) -> list[Judged]:
    """All candidates in the directory, or, where there is none, in the directories below it that were changed last."""
    judged, below = _judge_directory(directory, this)
    if any(each.complete or each.candidate.layout != "digits" for each in judged):
        return judged
    judged = []
    for path in _latest(below, this):
        try:
            inner, deeper = _judge_directory(path, this)
            if not inner and f"{path}/{INSIDE}" in deeper:
                inner, _ = _judge_directory(f"{path}/{INSIDE}", this)
        except OSError:
            continue  # gone meanwhile, or not ours to read
        judged += inner
    return judged


def _latest(paths: list[str], this: _Look) -> list[str]:
    """Those of the directories that were changed last, at most MAX_SUBDIRECTORIES."""
    dated = []
    for path in paths[: 8 * MAX_SUBDIRECTORIES]:
        this.check_time()
        try:
            dated.append((os.stat(path, follow_symlinks=False).st_mtime_ns, path))
        except OSError:
            continue
    return [path for _, path in sorted(dated, reverse=True)[:MAX_SUBDIRECTORIES]]


def _judge_directory(directory: str, this: _Look) -> tuple[list[Judged], list[str]]:
    """The judged candidates of one directory, and the paths of the other directories in it. Raises OSError."""
    prefix = directory.rstrip("/")
    where = os.open(directory, DIRECTORY_FLAGS)
    try:
        entries, cut = _list(where, prefix, this)
        tracked = _read_trackers(where, prefix, this)
        if cut:
            entries |= dict.fromkeys(_tracked_names(where, tracked), True)
            this.notes.append(f"more than {MAX_ENTRIES} names in {directory}: the others were not looked at")
        candidates = recognise(entries.items())
        judged = [_judge(where, prefix, candidate, tracked, this) for candidate in _few(candidates, tracked)]
    finally:
        os.close(where)
    found = [each for each in judged if each is not None]
    for each in found:
        if each.complete:  # a directory's own time says little; a file that is written over has a later one
            at_ns = 0 if each.candidate.is_directory else each.at_ns
            this.prints.setdefault(each.path, [WAS_COMPLETE, 0, at_ns])
    for name, layouts, step, _ in tracked:
        if not any(each.candidate.step == step and each.candidate.layout in layouts for each in found):
            this.notes.append(f"{prefix}/{name} says {step}, which is not there")
    known = {name for each in candidates if each.layout != "digits" for name in each.names}
    known |= {name for each in found if each.complete for name in each.candidate.names}
    return found, [
        f"{prefix}/{name}" for name, is_directory in entries.items() if is_directory and name not in known
    ]


def _few(candidates: Iterable[Candidate], tracked: list[Tracked]) -> list[Candidate]:
    """The newest of each layout, MAX_JUDGED at most, and those that trackers speak of."""
    told = {(layout, each.step) for each in tracked for layout in each.layouts}
    taken: dict[str, int] = {}
    few = []
    for candidate in candidates:
        taken[candidate.layout] = taken.get(candidate.layout, 0) + 1
        if taken[candidate.layout] <= MAX_JUDGED or (candidate.layout, candidate.step) in told:
            few.append(candidate)
    return few


def _list(where: int, prefix: str, this: _Look) -> tuple[dict[str, bool], bool]:
    """{name: is a directory} of what is neither a link nor another mount, and whether there was more than may be read."""
    found: dict[str, bool] = {}
    with os.scandir(where) as entries:
        for entry in entries:
            if this.entries_left <= 0:
                return found, True
            this.entries_left -= 1
            if this.entries_left % 1000 == 0:
                this.check_time()
            if entry.is_symlink() or f"{prefix}/{entry.name}" in this.others:
                continue
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory or entry.is_file(follow_symlinks=False):
                found[entry.name] = is_directory
    return found, False


# ---------------------------------------------------------------------------------------------- trackers


def _read_trackers(where: int, prefix: str, this: _Look) -> list[Tracked]:
    found = []
    for name, layouts in TRACKERS:
        read = files.read_small(name, where)
        if read is None:
            continue
        text, at_ns = read
        step = parse_tracker(text)
        if step is not None:
            found.append(Tracked(name, layouts, step, at_ns))
        elif name != "latest" and text.strip() != "release":
            this.notes.append(f"{prefix}/{name} says no step: {text.strip()[:40]!r}")
    return found


def _tracked_names(where: int, tracked: list[Tracked]) -> list[str]:
    """The directories that trackers speak of, found by name in a directory that is too long to be read."""
    names = [
        form.format(each.step)
        for each in tracked
        for layout in each.layouts
        for form in TRACKED_NAMES[layout]
    ]
    found = [(name, files.about(name, where)) for name in names]
    return [name for name, it in found if it is not None and stat.S_ISDIR(it.st_mode)]


def _read_given_tracker(job: str, path: str, wall: float) -> dict[str, Any] | None:
    """A tracker file that the configuration names; None where there is none yet, or it says no step."""
    try:
        fd = os.open(path, files.FILE_FLAGS & ~os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        it = os.fstat(fd)
        text = os.read(fd, files.MAX_SMALL).decode(errors="replace") if stat.S_ISREG(it.st_mode) else ""
    except OSError:
        return None
    finally:
        os.close(fd)
    step = parse_tracker(text)
    return (
        None
        if step is None
        else {"job": job, "path": path, "step": step, "age_s": max(0.0, wall - it.st_mtime)}
    )


# ---------------------------------------------------------------------------------------------- judging


def _judge(
    where: int, prefix: str, candidate: Candidate, tracked: list[Tracked], this: _Look
) -> Judged | None:
    """What one candidate is; None if it is gone meanwhile."""
    this.check_time()
    name = candidate.names[0]
    it = files.about(name, where)
    if it is None:
        return None
    judged = Judged(f"{prefix}/{name}", candidate, candidate.layout, at_ns=it.st_mtime_ns)
    if candidate.is_directory and not candidate.unfinished:
        told = next((each for each in tracked if candidate.layout in each.layouts), None)
        if told is not None:
            if candidate.order[0] <= told.step:
                return replace(
                    judged, complete=True, at_ns=told.at_ns if candidate.step == told.step else it.st_mtime_ns
                )
        else:
            for layout, marker in markers_of(candidate.layout):
                found = files.about(f"{name}/{marker}", where)
                if found is not None and files.marker_is_whole(f"{name}/{marker}", where):
                    return replace(judged, layout=layout, complete=True, at_ns=found.st_mtime_ns)
    return _judge_by_change(where, judged, this)


def _judge_by_change(where: int, judged: Judged, this: _Look) -> Judged:
    """A candidate without a sign that it is complete: files are so if they have their ends, or do not change any more."""
    candidate = judged.candidate
    whole = None if candidate.is_directory else files.files_are_whole(candidate.names, where)
    if whole and not candidate.unfinished:
        return replace(judged, complete=True, at_ns=_newest_ns(candidate, where, judged.at_ns))
    if sum(files_ != WAS_COMPLETE for files_, *_ in this.prints.values()) >= MAX_PRINTS:
        return judged
    taken = files.take_print(candidate, where, MAX_PRINT_FILES, this.check_time)
    this.prints[judged.path] = taken.packed()  # also of what has settled: the next look must find it the same
    judged = replace(judged, at_ns=taken.newest_ns, print=taken)
    settles = candidate.layout in SETTLES if candidate.is_directory else whole is None
    if candidate.layout == "numbered":
        settles = files.may_settle(candidate.names[0], where)
        judged = replace(judged, layout="plain" if settles else "dcp")
    same = this.before is not None and this.before.get(judged.path) == taken.packed()
    old = this.before is None and this.wall - taken.newest_ns / 1e9 > SETTLED_S
    complete = settles and not candidate.unfinished and taken.size_bytes > 0 and (same or old)
    return replace(judged, complete=complete)


def _newest_ns(candidate: Candidate, where: int, at_ns: int) -> int:
    times = [
        it.st_mtime_ns
        for name in candidate.names[: files.MAX_NAMES]
        if (it := files.about(name, where)) is not None
    ]
    return max([at_ns, *times])


def is_newer(one: Judged, complete: Judged | None) -> bool:
    """Whether `one` is newer than the newest complete one: by its number, or without one by its time."""
    if complete is None:
        return True
    if one.candidate.step is None or complete.candidate.step is None:
        return one.at_ns > complete.at_ns
    return one.candidate.order > complete.candidate.order


def newest(judged: Iterable[Judged]) -> Judged | None:
    """The newest complete one: by number within a layout and a directory, by time between them.

    Where a tracker speaks for a layout, it alone decides, for the trainer resumes from what it says: what has a higher number
    is not complete. A file without a number in its name counts only where nothing else is complete.
    """
    best: dict[tuple[str, str], Judged] = {}
    for each in judged:
        key = (os.path.dirname(each.path), each.layout)
        if each.complete and (key not in best or each.candidate.order > best[key].candidate.order):
            best[key] = each
    numbered = [each for each in best.values() if each.candidate.order > (0, 0)]
    return max(numbered or best.values(), key=lambda each: each.at_ns, default=None)


def _changed(one: Judged, before: dict[str, list[int]] | None) -> bool:
    """Whether it grew, changed or appeared since the look before; at the first look nobody can say."""
    if before is None or one.print is None:
        return False
    then = before.get(one.path)
    if then is not None and then[0] == WAS_COMPLETE:
        return 0 < then[2] < one.print.newest_ns
    return then != one.print.packed()
