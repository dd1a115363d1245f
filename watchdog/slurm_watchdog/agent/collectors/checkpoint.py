"""Checkpoints of the jobs on this node, and files that jobs write to as their loop turns, where a site has named them.

The loop only knows names: the child that reads the logs of the same mount as the same user looks, and what is asked in
one tick is answered in a later one.

Sees: the newest complete checkpoint: step, age, size, and whether a newer one is being written (Megatron,
    DeepSpeed, PyTorch DCP, Hugging Face, Lightning, NeMo, Composer, Orbax and plain files)
From: directories that the ranks' command lines or `jobs.checkpoint_directories` name, trackers
How often: every 30 s, every 5 s while one is awaited; 8 directories a job
Never: the tensors: of a file its end or its header
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import (
    Footprints,
    ScannedPlace,
)
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import PlaceKind, ScanCheckpoints
from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.processes.identity_cache import MAX_DIRECTORIES
from slurm_watchdog.base.mounts import mount_of
from slurm_watchdog.base.structs import only
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, Role
from slurm_watchdog.model.report import CheckpointSection, ProcessSection

MAX_TRACKERS = 4
MAX_CLOCKS = 4
CLOCK_S = 30.0  # Files that are named for progress are looked at this often at least.
EVENT_OF: dict[PlaceKind, tuple[EventKind, str]] = {
    "directory": (EventKind.CHECKPOINT, "directory"),
    "tracker": (EventKind.CHECKPOINT, "tracker"),
    "clock": (EventKind.PROGRESS, "file"),
}
"""Kind of a place -> kind and pattern of the event that it gives."""
MAX_PLACES = 64  # Of the node: directories and trackers together.
SOON_S = 5.0  # While one is being written its directory is looked at this often: the controller waits for it.
BUDGET_S = 2.0  # For one look of a child at all that it is asked about, system calls that hang not counted.
CACHED_S = 60.0  # A client may show a directory that old (acdirmax of nfs(5)): a checkpoint was complete since then.
MAX_MOVES = 8  # A directory that is named through links is followed over so many mounts.


@dataclass
class _Place:
    """One directory, tracker or clock of one job. `path` is where it lies, `reported` what of it was reported last."""

    path: str
    kind: PlaceKind
    due: float
    row: Checkpoint  # As it was at `scanned_at`.
    error: str | None = "not read yet"
    asked_at: float = 0.0
    scanned_at: float | None = None
    memory: Footprints | None = None
    reported: tuple[Any, ...] = ()
    moves: int = 0


Key = tuple[str, str]  # Job, and the directory or tracker as it was named.


class CheckpointSchedule(msgspec.Struct):
    """What is looked at, and what came of it since the last report."""

    probes: Children
    logs: JobLogs
    interval_s: float
    _places: dict[Key, _Place] = {}
    _asked: set[str] = set()
    _events: list[tuple[float, Event]] = []
    _recent: dict[Key, tuple[float, Event]] = {}

    def collect(
        self, now: float, deadline_s: float, directories: Mapping[str, Iterable[str]], hurry: Collection[str] = ()
    ) -> tuple[tuple[Checkpoint, ...], tuple[Event, ...]]:
        """A row for each directory, and an event for each newest complete checkpoint that is new since the last call.
        `directories` are absolute, by job; the trackers that the controller names for its jobs are read as well. Those
        of the jobs in `hurry` are looked at every SOON_S: of them someone waits for the next one. Call it after the
        logs were read: it shares their children."""
        self._note_places(now, directories)
        for (job_id, _), place in self._places.items():
            if job_id in hurry:
                place.due = min(place.due, place.asked_at + SOON_S)
        self._ask(now, deadline_s)
        rows = tuple(self._row(place, now) for place in self._places.values() if place.kind == "directory")
        events = tuple(replace(event, age_s=event.age_s + now - at) for at, event in self._events)
        self._events = []
        return rows, events

    def retell(self) -> None:
        """Puts the newest checkpoint of each place before what is new: the controller restarted and knows none."""
        past = [each for each in self._recent.values() if each not in self._events]
        self._events = sorted(past, key=lambda each: each[0] - each[1].age_s) + self._events

    # -- where -------------------------------------------------------------------------------------------------

    def _note_places(self, now: float, directories: Mapping[str, Iterable[str]]) -> None:
        wanted: dict[Key, PlaceKind] = {}
        for job_id, paths in directories.items():
            wanted |= {(job_id, path): "directory" for path in list(dict.fromkeys(paths))[:MAX_DIRECTORIES]}
        for job_id, watch in self.logs.watch.items():
            wanted |= {(job_id, path): "tracker" for path in watch.checkpoint_trackers[:MAX_TRACKERS]}
            for path in watch.progress_files[:MAX_CLOCKS]:
                wanted.setdefault((job_id, path), "clock")
        kept = [key for key in wanted if key[1].startswith("/")][:MAX_PLACES]
        self._places = {key: self._places.get(key) or _new(key, wanted[key], now) for key in kept}
        self._recent = {key: event for key, event in self._recent.items() if key in self._places}

    def _child_of(self, job_id: str, path: str) -> tuple[str, int]:
        uid = self.logs.owner_of(job_id)
        return self.logs.key_of(path, uid), uid

    def _ask(self, now: float, deadline_s: float) -> None:
        plan: dict[tuple[str, int, str], list[Key]] = {}
        for key, place in self._places.items():
            if (untouched := self.logs.why_untouched(place.path)) is not None:
                place.error = untouched
            elif now >= place.due and (key[0] in self.logs.jobs or not self.logs.become_owner):
                where = mount_of(place.path, self.logs.mounts)
                point = where.point if where is not None else "/"
                plan.setdefault((*self._child_of(key[0], place.path), point), []).append(key)
        for (child, uid, mount), keys in plan.items():
            if child in self._asked:
                continue
            places = [(job, self._places[job, named]) for job, named in keys]
            request = ScanCheckpoints(
                mount=mount,
                others=sorted({m.point for m in self.logs.mounts if _is_below(m.point, mount)}),
                budget_s=BUDGET_S,
                places=[(place.kind, job, place.path, place.memory) for job, place in places],
            )
            then = partial(self._apply, child, now, tuple(keys))
            if self.probes.ask(child, request, deadline_s, now, then, uid) is not None:
                self._asked.add(child)

    # -- what came of it ---------------------------------------------------------------------------------------

    def _apply(self, child: str, asked_at: float, keys: tuple[Key, ...], answer: Answer[list[ScannedPlace]]) -> None:
        """The answer of a child about `keys`. One that hangs shows in every row, for as long as it does."""
        self._asked.discard(child)
        for key, found in zip_longest(keys, answer.value or ()):
            place = self._places.get(key)
            if place is None:
                continue
            every_s = min(CLOCK_S, self.interval_s) if place.kind == "clock" else self.interval_s
            place.asked_at, place.due = asked_at, asked_at + every_s
            if found is None:
                place.error = place.error if answer.timed_out else answer.error
            elif found.moved is not None:  # it is named through a link to another mount: its child is asked, at once
                place.path, place.due, place.moves = found.moved, asked_at, place.moves + 1
                if place.moves > MAX_MOVES:
                    place.path, place.due, place.moves = key[1], asked_at + every_s, 0
                    place.error = "its name leads through too many links from mount to mount"
            else:
                place.path, place.moves = key[1], 0  # next time from its name again: links may be changed
                if place.kind == "directory":
                    self._apply_directory(key, place, found)
                else:
                    self._apply_file(key, place, found)

    def _apply_directory(self, key: Key, place: _Place, found: ScannedPlace) -> None:
        at, before = place.asked_at, place.scanned_at
        if not found.was_read:  # what was known before stays, with the reason
            place.error = found.error or ""
            return
        place.memory, place.scanned_at, place.error = found.memory, at, found.error
        place.row = replace(only(Checkpoint, found), directory=key[1])
        if found.writing:
            place.due = at + min(SOON_S, self.interval_s)
        if found.path is not None:
            age_s, reported_ns = found.age_s or 0.0, place.reported[2] if place.reported else 0
            # A new place is compared from its second scan on; what was there at the first has its true age.
            if before is not None and found.at_ns > reported_ns:
                age_s = min(age_s, at - before + CACHED_S)  # the server's clock may be slow; it was not there then
            self._report(key, place, (found.path, found.step, found.at_ns), source=found.path, age_s=age_s)

    def _apply_file(self, key: Key, place: _Place, found: ScannedPlace) -> None:
        first, place.scanned_at = place.scanned_at is None, place.asked_at
        if place.kind == "tracker" and found.step is not None:
            self._report(key, place, (None, found.step), source=key[1], age_s=found.age_s or 0.0)
        elif place.kind == "clock" and found.at_ns:
            # At the first scan the event says where the count begins.
            at_s = found.at_ns / 1e9
            self._report(
                key, place, (at_s, None, found.size_bytes), source=key[1], age_s=0.0, count=at_s, backlog=first
            )

    def _report(self, key: Key, place: _Place, newest: tuple[Any, ...], **values: Any) -> None:
        """An event of what is new; `newest` has its step in the second place."""
        if newest == place.reported:
            return
        place.reported = newest
        kind, pattern = EVENT_OF[place.kind]
        at, event = place.asked_at, Event(kind=kind, job_id=key[0], step=newest[1], pattern=pattern, **values)
        self._events.append((at, event))
        del self._events[: -4 * MAX_PLACES]
        if kind is EventKind.CHECKPOINT:
            self._recent[key] = (at, event)

    def _row(self, place: _Place, now: float) -> Checkpoint:
        row, since_s = place.row, 0.0 if place.scanned_at is None else now - place.scanned_at
        child, _ = self._child_of(row.job_id, place.path)
        silent = self.logs.why_silent(child, now)
        return replace(
            row,
            age_s=None if row.age_s is None else row.age_s + since_s,
            looked_age_s=since_s,
            writing=row.writing and silent is None,
            error=place.error if silent is None else silent,
        )


def _new(key: Key, kind: PlaceKind, now: float) -> _Place:
    return _Place(key[1], kind, now, Checkpoint(job_id=key[0], directory=key[1]))


def _is_below(path: str, mount: str) -> bool:
    return path != mount and path.startswith(mount.rstrip("/") + "/")


class CheckpointCollector(Collector):
    """The newest complete checkpoint of each job, and whether one is being written."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self.keeper = self._schedule = CheckpointSchedule(
            context.children, context.logs, context.settings.checkpoint_interval
        )

    def collect(self, now: float) -> CheckpointSection:
        """Where the controller says so, and what command lines name on the node of rank 0 alone."""
        directories = {job_id: list(watch.checkpoint_directories) for job_id, watch in self.context.jobs.watch.items()}
        processes = self.sections.of(ProcessSection).processes
        for job_id in {each.job_id for each in processes if each.rank == 0 and each.role is Role.RANK}:
            directories.setdefault(job_id, []).extend(self.context.processes.checkpoint_directories_of(job_id))
        rows, events = self._schedule.collect(now, self.deadline_s, directories, self.context.jobs.awaiting_checkpoints)
        return CheckpointSection(checkpoints=rows, events=events)


SPEC = CollectorSpec("checkpoint", CheckpointSection, CheckpointCollector)
