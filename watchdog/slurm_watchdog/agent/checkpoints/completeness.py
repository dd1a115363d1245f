"""Whether a candidate is a complete checkpoint: by its tracker, its marker, its end, or because it does not
change any more."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from slurm_watchdog.agent.checkpoints import files
from slurm_watchdog.agent.checkpoints.files import MAX_PRINT_FILES, Print
from slurm_watchdog.base import clock
from slurm_watchdog.knowledge.checkpoint_layouts import SETTLES, Candidate, markers_of

MAX_ENTRIES = 10_000
"""Names that one look at a directory reads: 5 ms here, and one to ten requests to a file server."""
MAX_PRINTS = 16
"""Of those that are not complete so many are looked into."""
WAS_COMPLETE = -1
"""In the place of a number of files: nobody looked into it, for it was complete."""
SETTLES_S = 20.0
"""What has not changed for so long, from look to look, has settled."""
SETTLED_S = 300.0
"""At the first look, what nobody has written to for so long by the times of its files."""


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
class Look:
    """One look at one directory. `before` has the prints of the look before, by path; None at the first."""

    now: float
    wall: float
    ends_at: float
    before: dict[str, list[Any]] | None
    others: frozenset[str]
    """Points of other mounts: nothing there is touched."""
    entries_left: int = MAX_ENTRIES
    notes: list[str] = field(default_factory=list)
    prints: dict[str, list[Any]] = field(default_factory=dict)
    """For the next look."""

    def check_time(self) -> None:
        if clock.monotonic() > self.ends_at:
            raise TooLongError


def judge(where: int, prefix: str, candidate: Candidate, tracked: list[Tracked], this: Look) -> Judged | None:
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


def _judge_by_change(where: int, judged: Judged, this: Look) -> Judged:
    """A candidate without a sign that it is complete: files are so if they have their ends, or do not change
    any more."""
    candidate = judged.candidate
    if candidate.layout == "digits" and not files.has_shards(candidate.names[0], where):
        return judged  # a date, the number of a run
    whole = None if candidate.is_directory else files.files_are_whole(candidate.names, where)
    if whole and not candidate.unfinished:
        return replace(judged, complete=True, at_ns=_newest_ns(candidate, where, judged.at_ns))
    if sum(files_ != WAS_COMPLETE for files_, *_ in this.prints.values()) >= MAX_PRINTS:
        return judged
    taken = files.take_print(candidate, where, MAX_PRINT_FILES, this.check_time)
    since = _unchanged_since(judged.path, taken, this)
    this.prints[judged.path] = [*taken.packed(), since]
    judged = replace(judged, at_ns=taken.newest_ns, print=taken)
    settles = candidate.layout in SETTLES if candidate.is_directory else whole is None
    if candidate.layout == "numbered":
        settles = files.may_settle(candidate.names[0], where)
        judged = replace(judged, layout="plain" if settles else "dcp")
    settled = settles and since < this.now and this.now - since >= SETTLES_S
    complete = settled and not candidate.unfinished and taken.size_bytes > 0
    return replace(judged, complete=complete)


def _unchanged_since(path: str, taken: Print, this: Look) -> float:
    """Since when, on our clock, it has been as it is now, as far as is known."""
    if this.before is None:
        return this.now - SETTLES_S - 1 if this.wall - taken.newest_ns / 1e9 > SETTLED_S else this.now
    *then, since = this.before.get(path, [0])
    return float(since) if then == taken.packed() else this.now


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

    Where a tracker speaks for a layout, it alone decides, for the trainer resumes from what it says: what has
    a higher number
    is not complete. A file without a number in its name counts only where nothing else is complete.
    """
    best: dict[tuple[str, str], Judged] = {}
    for each in judged:
        key = (os.path.dirname(each.path), each.layout)
        if each.complete and (key not in best or _rank(each) > _rank(best[key])):
            best[key] = each
    numbered = [each for each in best.values() if each.candidate.order > (0, 0)]
    return max(numbered or best.values(), key=lambda each: each.at_ns, default=None)


def _rank(judged: Judged) -> tuple[tuple[int, int], int]:
    return judged.candidate.order, judged.at_ns


def has_changed(one: Judged, before: dict[str, list[Any]] | None) -> bool:
    """Whether it grew, changed or appeared since the look before; at the first look nobody can say."""
    if before is None or one.print is None:
        return False
    then = before.get(one.path)
    if then is not None and then[0] == WAS_COMPLETE:
        return 0 < int(then[2]) < one.print.newest_ns
    return then is None or then[:3] != one.print.packed()
