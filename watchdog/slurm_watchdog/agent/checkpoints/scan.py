"""Scans directories of checkpoints, in a child that is the job's owner, on the one mount that the child is for.

Everything is bounded: entries, depth, files, time. Links are not followed, with one exception: the directory itself may
be named through links, and if these lead to another mount, the answer says where, for that mount's child.
The child remembers nothing: what has to be compared with the scan before comes with the request and goes back.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from msgspec.structs import replace

from slurm_watchdog.agent.checkpoints import files
from slurm_watchdog.agent.checkpoints.files import (
    DIRECTORY_FLAGS,
    MAX_ENTRIES,
    MAX_FILES,
    MAX_FOOTPRINT_FILES,
    UNMEASURED,
    WAS_COMPLETE,
    Assessed,
    Scan,
    TooLongError,
    Tracked,
    assess,
    has_changed,
    is_newer,
    newest,
)
from slurm_watchdog.agent.children.answers import (
    Footprint,
    ScannedPlace,
)
from slurm_watchdog.agent.children.requests import ScanCheckpoints, WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import describe, opened
from slurm_watchdog.knowledge.checkpoint_layouts import TRACKED_NAMES, TRACKERS, Candidate, parse_tracker, recognise

MAX_ASSESSED = 12  # Of the newest of each layout and directory: more leftovers of crashes are a case for a person.
MAX_SUBDIRECTORIES = 8
INSIDE = "checkpoints"  # The subdirectory that Lightning, NeMo and MaxText put below a run's own directory.


def scan_checkpoints(request: ScanCheckpoints, worker: WorkerState) -> list[ScannedPlace]:
    """One scan of the places on this child's mount."""
    now, wall = clock.monotonic(), clock.wall()
    others, end = frozenset(request.others), now + request.budget_s
    rows = []
    for kind, job, path, memory in request.places:
        this = Scan(now, wall, end, memory, others)
        row = ScannedPlace(job_id=job, directory=path, memory=memory)
        try:
            real, inside = (path, True) if kind == "tracker" else files.resolve(path, request.mount, others)
            row = SCANS[kind](real, this, row) if inside else replace(row, moved=real)
        except TooLongError:
            row = replace(row, error=f"there was more to look at than {request.budget_s:g} s allow")
        except OSError as problem:
            row = replace(row, error=describe(problem))
        rows.append(row)
    return rows


def _read_clock(path: str, this: Scan, row: ScannedPlace) -> ScannedPlace:
    """When a file, or the newest in a directory, was last written to, and how many bytes they are."""
    candidate = Candidate("clock", (os.path.basename(path),), True)
    with opened(os.path.dirname(path), DIRECTORY_FLAGS) as where:
        found = files.take_footprint(candidate, where, MAX_FOOTPRINT_FILES, this.check_time)
    return replace(row, at_ns=found.newest_ns, size_bytes=found.size_bytes)


def _read_given_tracker(path: str, this: Scan, row: ScannedPlace) -> ScannedPlace:
    """A tracker file that the configuration names; without a step where there is none yet."""
    text, at_ns = files.read_small(path, None, files.FILE_FLAGS & ~os.O_NOFOLLOW) or ("", 0)
    return replace(row, step=parse_tracker(text), age_s=max(0.0, this.wall - at_ns / 1e9))


def _scan_directory(directory: str, this: Scan, row: ScannedPlace) -> ScannedPlace:
    assessed = _search(directory, this)
    complete = newest(assessed)
    rest = [each for each in assessed if not each.complete and is_newer(each, complete)]
    growing = [each for each in rest if has_changed(each, this.before)]
    writing = next(iter(growing or rest), None)
    layout = complete.layout if complete else writing.layout if writing else None
    if complete is not None:
        row = replace(
            row, step=complete.candidate.step, path=complete.path, foreign=not _is_own(complete), at_ns=complete.at_ns,
            age_s=max(0.0, this.wall - complete.at_ns / 1e9), size_bytes=_size(complete, this),
        )  # fmt: skip
    if writing is not None:
        row = replace(row, writing_step=writing.candidate.step)
    return replace(
        row, was_read=True, layout=layout, writing=bool(growing), error="; ".join(this.notes) or None,
        memory=this.footprints,
    )  # fmt: skip


def _is_own(complete: Assessed) -> bool:
    """Whether it is this user's, who is the job's owner: another's may hold what the trainer would execute."""
    with opened(os.path.dirname(complete.path), DIRECTORY_FLAGS) as where:
        found = [files.stat_of(name, where) for name in complete.candidate.names[: files.MAX_NAMES]]
    return all(it is not None and it.st_uid == os.geteuid() for it in found)


def _size(complete: Assessed, this: Scan) -> int | None:
    """The bytes of a checkpoint: added up once for each; None if they are too many to be added up."""
    known, taken = (this.before or {}).get(complete.path), this.footprints[complete.path]
    if taken.files != WAS_COMPLETE and taken.whole:
        return taken.size_bytes  # one that has settled: its files were counted just now
    if known is None or (known.files, known.newest_ns) != (WAS_COMPLETE, taken.newest_ns) or known.size_bytes < 0:
        with opened(os.path.dirname(complete.path), DIRECTORY_FLAGS) as where:
            known = files.take_footprint(complete.candidate, where, MAX_FILES, this.check_time)
            known = replace(known, size_bytes=known.size_bytes if known.whole else 0)
    if taken.files == WAS_COMPLETE:
        this.footprints[complete.path] = replace(taken, size_bytes=known.size_bytes)
    return known.size_bytes or None


# ---------------------------------------------------------------------------------------------- where to look


def _search(directory: str, this: Scan) -> list[Assessed]:
    """All candidates in the directory, or, where there is none, in the directories below it that were changed last."""
    assessed, below = _assess_directory(directory, this)
    if assessed:
        return assessed
    for path in _latest(below, this):
        try:
            inner, deeper = _assess_directory(path, this)
            if not inner and f"{path}/{INSIDE}" in deeper:
                inner, _ = _assess_directory(f"{path}/{INSIDE}", this)
        except OSError:
            continue  # gone meanwhile, or not ours to read
        assessed += inner
    return assessed


def _latest(paths: list[str], this: Scan) -> list[str]:
    """Those of the directories that were changed last, at most MAX_SUBDIRECTORIES."""
    dated = []
    for path in paths[: 8 * MAX_SUBDIRECTORIES]:
        this.check_time()
        try:
            dated.append((os.stat(path, follow_symlinks=False).st_mtime_ns, path))
        except OSError:
            continue
    return [path for _, path in sorted(dated, reverse=True)[:MAX_SUBDIRECTORIES]]


def _assess_directory(directory: str, this: Scan) -> tuple[list[Assessed], list[str]]:
    """The assessed candidates of one directory, and the paths of the other directories in it. Raises OSError."""
    prefix = directory.rstrip("/")
    with opened(directory, DIRECTORY_FLAGS) as where:
        entries, cut = _list(where, prefix, this)
        tracked = _read_trackers(where, prefix, this)
        if cut:
            entries |= dict.fromkeys(_tracked_names(where, tracked), True)
            this.notes.append(f"more than {MAX_ENTRIES} names in {directory}: the others were not looked at")
        candidates = recognise(entries.items())
        assessed = [
            assess(where, prefix, candidate, tracked, this) for candidate in _newest_of_each(candidates, tracked)
        ]
        assessed.append(_read_tag(where, prefix, entries, candidates))
    found = [
        each
        for each in assessed
        if each is not None and (each.complete or each.candidate.layout != "digits" or each.footprint)
    ]
    for each in found:
        if each.complete:
            this.footprints.setdefault(each.path, Footprint(WAS_COMPLETE, UNMEASURED, each.at_ns, this.now))
    for name, layouts, step, _ in tracked:
        if not any(each.candidate.step == step and each.candidate.layout in layouts for each in found):
            this.notes.append(f"{prefix}/{name} says {step}, which is not there")
    known = {name for each in candidates if each.layout != "digits" for name in each.names}
    known |= {name for each in found for name in each.candidate.names}
    return found, [f"{prefix}/{name}" for name, is_directory in entries.items() if is_directory and name not in known]


def _newest_of_each(candidates: Iterable[Candidate], tracked: list[Tracked]) -> list[Candidate]:
    """The newest of each layout, MAX_ASSESSED at most, and those that trackers speak of."""
    told = {(layout, each.step) for each in tracked for layout in each.layouts}
    taken: dict[str, int] = {}
    kept = []
    for candidate in candidates:
        taken[candidate.layout] = taken.get(candidate.layout, 0) + 1
        if taken[candidate.layout] <= MAX_ASSESSED or (candidate.layout, candidate.step) in told:
            kept.append(candidate)
    return kept


def _list(where: int, prefix: str, this: Scan) -> tuple[dict[str, bool], bool]:
    """{name: is a directory} of what is neither a link nor another mount, and whether more was left unread."""
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


def _read_trackers(where: int, prefix: str, this: Scan) -> list[Tracked]:
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


def _read_tag(where: int, prefix: str, entries: dict[str, bool], candidates: list[Candidate]) -> Assessed | None:
    """The directory that DeepSpeed's `latest` names where the trainer chose a name of its own, without a step then."""
    read = files.read_small("latest", where)
    tag = read[0].strip() if read is not None else ""
    if read is None or not entries.get(tag) or any(tag in each.names for each in candidates):
        return None
    return Assessed(f"{prefix}/{tag}", Candidate("deepspeed", (tag,), True), "deepspeed", True, read[1])


def _tracked_names(where: int, tracked: list[Tracked]) -> list[str]:
    """The directories that trackers speak of, found by name in a directory that is too long to be read."""
    names = [form.format(each.step) for each in tracked for layout in each.layouts for form in TRACKED_NAMES[layout]]
    found = [(name, files.stat_of(name, where)) for name in names]
    return [name for name, it in found if it is not None and stat.S_ISDIR(it.st_mode)]


SCANS = {"directory": _scan_directory, "tracker": _read_given_tracker, "clock": _read_clock}
