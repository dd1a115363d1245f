"""Looks at directories of checkpoints, in a child that is the job's owner, on the one mount that the child is for.

Everything is bounded: entries, depth, files, time. Links are not followed, with one exception: the directory itself may
be named through links, and if these lead to another mount, the caller is told where and asks that mount's child.
The child remembers nothing: what has to be compared with the look before comes with the question and goes back.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

from slurm_watchdog.agent.checkpoints import files
from slurm_watchdog.agent.checkpoints.completeness import (
    MAX_ENTRIES,
    WAS_COMPLETE,
    Judged,
    Look,
    TooLongError,
    Tracked,
    has_changed,
    is_newer,
    judge,
    newest,
)
from slurm_watchdog.agent.checkpoints.files import DIRECTORY_FLAGS, MAX_FILES, MAX_PRINT_FILES
from slurm_watchdog.agent.workers.request_types import LookAtCheckpoints
from slurm_watchdog.base import clock
from slurm_watchdog.base.os_errors import describe
from slurm_watchdog.knowledge.checkpoint_layouts import (
    TRACKED_NAMES,
    TRACKERS,
    Candidate,
    parse_tracker,
    recognise,
)

MAX_JUDGED = 12
"""Of the newest of each layout and directory: more leftovers of crashes than that are a case for a person."""
MAX_SUBDIRECTORIES = 8
INSIDE = "checkpoints"
"""The subdirectory that Lightning, NeMo and MaxText put below a run's own directory."""


def look(args: LookAtCheckpoints, state: dict[str, Any]) -> dict[str, Any]:
    """One look at the directories and trackers of this child's mount.

    Given {"mount", "others": mount points below it, "budget_s", "directories": [[job, directory, before]…], "trackers":
    [[job, path]…], "clocks": [[job, path]…]}. `before` is None at the first look, then what the last one gave
    back. Returns {"directories": [{job,
    directory, before, error, moved, and unless there is an error: layout, step, path, at_ns, age_s, size_bytes,
    writing_step, writing, writing_bytes}…], "trackers": [{job, path, step, age_s}…], "clocks": [{job, path,
    moved, and if
    there is something: at_ns, size_bytes}…]}. `moved` is where the directory lies, if that is another mount;
    a tracker is left out
    while it says no step.
    """
    now, wall = clock.monotonic(), clock.wall()
    others = frozenset(args.others)
    rows = []
    for job, directory, before in args.directories:
        memory = before or {}
        this = Look(now, wall, now + args.budget_s, memory.get("prints"), others)
        row: dict[str, Any] = {
            "job": job,
            "directory": directory,
            "before": before,
            "error": None,
            "moved": None,
        }
        try:
            real, inside = files.resolve(directory, args.mount, others)
            row |= _look_at(real, this, memory.get("size")) if inside else {"moved": real}
        except TooLongError:
            row["error"] = f"there was more to look at than {args.budget_s:g} s allow"
        except OSError as problem:
            row["error"] = describe(problem)
        rows.append(row)
    trackers = [found for job, path in args.trackers if (found := _read_given_tracker(job, path, wall))]
    this = Look(now, wall, now + args.budget_s, None, others)
    clocks = [_read_clock(job, path, args.mount, this) for job, path in args.clocks]
    return {"directories": rows, "trackers": trackers, "clocks": clocks}


def _read_clock(job: str, path: str, mount: str, this: Look) -> dict[str, Any]:
    """When a file, or the newest in a directory, was last written to, and how many bytes they are."""
    row: dict[str, Any] = {"job": job, "path": path, "moved": None}
    try:
        real, inside = files.resolve(path, mount, this.others)
        if not inside:
            return row | {"moved": real}
        where = os.open(os.path.dirname(real), DIRECTORY_FLAGS)
    except OSError:
        return row  # not there yet, or not to be read
    try:
        candidate = Candidate("clock", (os.path.basename(real),), True)
        found = files.take_print(candidate, where, MAX_PRINT_FILES, this.check_time)
    except TooLongError:
        return row
    finally:
        os.close(where)
    return row | ({"at_ns": found.newest_ns, "size_bytes": found.size_bytes} if found.newest_ns else {})


def _look_at(directory: str, this: Look, size: list[Any] | None) -> dict[str, Any]:
    judged = _search(directory, this)
    complete = newest(judged)
    rest = [each for each in judged if not each.complete and is_newer(each, complete)]
    growing = [each for each in rest if has_changed(each, this.before)]
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


def _size(complete: Judged, this: Look, known: list[Any] | None) -> list[Any]:
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


def _search(directory: str, this: Look) -> list[Judged]:
    """All candidates in the directory, or, where there is none, in the directories below it that were changed last."""
    judged, below = _judge_directory(directory, this)
    if judged:
        return judged
    for path in _latest(below, this):
        try:
            inner, deeper = _judge_directory(path, this)
            if not inner and f"{path}/{INSIDE}" in deeper:
                inner, _ = _judge_directory(f"{path}/{INSIDE}", this)
        except OSError:
            continue  # gone meanwhile, or not ours to read
        judged += inner
    return judged


def _latest(paths: list[str], this: Look) -> list[str]:
    """Those of the directories that were changed last, at most MAX_SUBDIRECTORIES."""
    dated = []
    for path in paths[: 8 * MAX_SUBDIRECTORIES]:
        this.check_time()
        try:
            dated.append((os.stat(path, follow_symlinks=False).st_mtime_ns, path))
        except OSError:
            continue
    return [path for _, path in sorted(dated, reverse=True)[:MAX_SUBDIRECTORIES]]


def _judge_directory(directory: str, this: Look) -> tuple[list[Judged], list[str]]:
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
        judged = [judge(where, prefix, candidate, tracked, this) for candidate in _few(candidates, tracked)]
        judged.append(_read_tag(where, prefix, entries, candidates))
    finally:
        os.close(where)
    found = [
        each
        for each in judged
        if each is not None and (each.complete or each.candidate.layout != "digits" or each.print)
    ]
    for each in found:
        if each.complete:  # a directory's own time says little; a file that is written over has a later one
            at_ns = 0 if each.candidate.is_directory else each.at_ns
            this.prints.setdefault(each.path, [WAS_COMPLETE, 0, at_ns, this.now])
    for name, layouts, step, _ in tracked:
        if not any(each.candidate.step == step and each.candidate.layout in layouts for each in found):
            this.notes.append(f"{prefix}/{name} says {step}, which is not there")
    known = {name for each in candidates if each.layout != "digits" for name in each.names}
    known |= {name for each in found for name in each.candidate.names}
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


def _list(where: int, prefix: str, this: Look) -> tuple[dict[str, bool], bool]:
    """{name: is a directory} of what is neither a link nor another mount, and whether there was more than may
    be read."""
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


def _read_trackers(where: int, prefix: str, this: Look) -> list[Tracked]:
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


def _read_tag(
    where: int, prefix: str, entries: dict[str, bool], candidates: list[Candidate]
) -> Judged | None:
    """The directory that DeepSpeed's `latest` names where the trainer chose a name of its own, without a step then."""
    read = files.read_small("latest", where)
    tag = read[0].strip() if read is not None else ""
    if read is None or not entries.get(tag) or any(tag in each.names for each in candidates):
        return None
    return Judged(f"{prefix}/{tag}", Candidate("deepspeed", (tag,), True), "deepspeed", True, read[1])


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
    if step is None:
        return None
    return {"job": job, "path": path, "step": step, "age_s": max(0.0, wall - it.st_mtime)}
