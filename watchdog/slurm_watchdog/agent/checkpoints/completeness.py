"""Whether a candidate is a complete checkpoint: by its tracker, its marker, its end, or because it does not
change any more."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from slurm_watchdog.agent.checkpoints import files
from slurm_watchdog.agent.checkpoints.files import MAX_FOOTPRINT_FILES
from slurm_watchdog.agent.workers.answer_types import Footprint
from slurm_watchdog.base import clock
from slurm_watchdog.knowledge.checkpoint_layouts import SETTLES, Candidate, markers_of

MAX_ENTRIES = 10_000  # Names that one look at a directory reads: 5 ms here, and one to ten requests to a file server.
MAX_FOOTPRINTS = 16  # Of those that are not complete so many are looked into.
WAS_COMPLETE = -1  # In the place of a number of files: no one looked into it, for it was complete.
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
    it = files.stat_of(name, where)
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
                found = files.stat_of(f"{name}/{marker}", where)
                if found is not None and files.marker_is_whole(f"{name}/{marker}", where):
                    return replace(assessed, layout=layout, complete=True, at_ns=found.st_mtime_ns)
    return _assess_by_change(where, assessed, this)


def _assess_by_change(where: int, assessed: Assessed, this: Scan) -> Assessed:
    """A candidate without a sign that it is complete: files are so if they have their ends, or do not change
    any more."""
    candidate = assessed.candidate
    if candidate.layout == "digits" and not files.has_shards(candidate.names[0], where):
        return assessed  # a date, the number of a run
    whole = None if candidate.is_directory else files.files_are_whole(candidate.names, where)
    if whole and not candidate.unfinished:
        return replace(assessed, complete=True, at_ns=_newest_ns(candidate, where, assessed.at_ns))
    if sum(each.files != WAS_COMPLETE for each in this.footprints.values()) >= MAX_FOOTPRINTS:
        return assessed
    taken = files.take_footprint(candidate, where, MAX_FOOTPRINT_FILES, this.check_time)
    since = _unchanged_since(assessed.path, taken, this)
    this.footprints[assessed.path] = msgspec.structs.replace(taken, since=since)
    assessed = replace(assessed, at_ns=taken.newest_ns, footprint=taken)
    settles = candidate.layout in SETTLES if candidate.is_directory else whole is None
    if candidate.layout == "numbered":
        settles = files.may_settle(candidate.names[0], where)
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
    times = [
        it.st_mtime_ns for name in candidate.names[: files.MAX_NAMES] if (it := files.stat_of(name, where)) is not None
    ]
    return max([at_ns, *times])


def is_newer(one: Assessed, complete: Assessed | None) -> bool:
    """Whether `one` is newer than the newest complete one: by its number, or without one by its time."""
    if complete is None:
        return True
    if one.candidate.step is None or complete.candidate.step is None:
        return one.at_ns > complete.at_ns
    return one.candidate.order > complete.candidate.order


def newest(assessed: Iterable[Assessed]) -> Assessed | None:
    """The newest complete one: by number within a layout and a directory, by time between them.

    Where a tracker speaks for a layout, it alone decides, for the trainer resumes from what it says: what has
    a higher number is not complete. A file without a number in its name counts only where nothing else is
    complete.
    """
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
    if then is not None and then.files == WAS_COMPLETE:
        return 0 < then.newest_ns < one.footprint.newest_ns
    return then is None or not one.footprint.equals(then)
